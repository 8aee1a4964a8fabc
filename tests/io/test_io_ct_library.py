"""The compressed-tensors library reads what we write: MXFP6, MXFP8, mixed groups, and rotations of the inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from io_cases import assert_same, config_of, raw_tensors

import mxjax
from mxjax.errors import CheckpointError, MxjaxWarning
from mxjax.io.layouts import ct_config, ct_transform
from mxjax.transforms import Hadamard

torch = pytest.importorskip("torch", reason="compares with PyTorch: pip install 'mxjax[test]'")
pytest.importorskip("compressed_tensors", reason="compares with the library: pip install 'mxjax[test]'")

CT = "compressed-tensors"
WEIGHTS = "model.safetensors"
DTYPES = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}


def linear(shape=(48, 64), **rule):
    x = jax.random.normal(jax.random.key(0), shape)
    return mxjax.quantize({"w": x}, mxjax.QuantConfig(rules=[mxjax.Rule(axis=-1, **rule)]))["w"]


def scheme_of(folder):
    """The library's own parse of the whole quantization_config, and its one group."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.transform import TransformConfig

    config = config_of(folder)["quantization_config"]
    transforms = config.pop("transform_config")
    config.pop("sparsity_config"), config.pop("version")
    parsed = QuantizationConfig.model_validate(config)
    return parsed, TransformConfig.model_validate(transforms) if transforms else None


@pytest.mark.parametrize(
    "fmt, activation",
    [
        ("mxfp4", "mxfp4"),
        ("nvfp4", None),
        ("mxfp6_e2m3", "mxfp8_e4m3"),
        ("mxfp6_e2m3", None),
        ("mxfp8_e4m3", "mxfp8_e4m3"),
    ],
)
def test_the_library_decompresses_to_our_values(tmp_path, fmt, activation):
    from compressed_tensors.compressors import BaseCompressor

    w = linear(weight=fmt, activation=activation)
    mxjax.save(tmp_path / "out", {"a": {"weight": w}}, CT)
    group = next(iter(scheme_of(tmp_path / "out")[0].config_groups.values()))
    state = {}
    for name, (dtype, shape, data) in raw_tensors(tmp_path / "out" / WEIGHTS).items():
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(DTYPES[dtype])
        state[name.removeprefix("a.")] = flat.reshape(shape)
    compressor = (
        BaseCompressor.load_from_registry(group.format)
        if False
        else BaseCompressor.get_value_from_registry(group.format)
    )
    theirs = compressor.decompress(state, group)["weight"].float().numpy()
    ours = np.asarray(w.dequantize("bfloat16"), np.float32)
    assert np.array_equal(theirs.astype(jnp.bfloat16).astype(np.float32), ours)


def test_rotated_inputs(tmp_path):
    """W4A16 under a block Hadamard rotation: the library turns the input online and gets our product."""
    from compressed_tensors.transform import TransformFactory

    tree = {
        "model": {
            "up": {"weight": linear(weight="mxfp4", transform=Hadamard(32))},
            "down": {"weight": linear(weight="mxfp4", transform=Hadamard(16))},
            "plain": {"weight": linear(weight="mxfp4")},
        }
    }
    with pytest.warns(MxjaxWarning, match=r"2 layers have inputs that a loader must rotate.*first: model\.down"):
        mxjax.save(tmp_path / "out", tree, CT)
    assert_same(mxjax.load(tmp_path / "out"), tree)
    config = config_of(tmp_path / "out")["quantization_config"]["transform_config"]["config_groups"]
    assert {name: group["apply"][0]["targets"] for name, group in config.items()} == {
        "hadamard_16": ["model.down"],
        "hadamard_32": ["model.up"],
    }

    root = torch.nn.Module()
    root.model = torch.nn.Module()
    for name, parts in tree["model"].items():
        q = parts["weight"]
        layer = torch.nn.Linear(64, 48, bias=False)
        layer.weight.data = torch.tensor(np.asarray(q.qtensor.dequantize("float32")))  # as stored: turned already
        setattr(root.model, name, layer)
    _, transforms = scheme_of(tmp_path / "out")
    for name, scheme in transforms.config_groups.items():
        scheme.apply = [args for args in scheme.apply if args.is_online()]  # as vLLM: the others are in the weights
        TransformFactory.from_scheme(scheme, name=name).apply_to_model(root, use_tqdm=False)
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    for name, parts in tree["model"].items():
        with torch.no_grad():
            theirs = getattr(root.model, name)(torch.tensor(x)).numpy()
        ours = np.asarray(mxjax.qdot(x, parts["weight"]))
        # Two float32 products over 64 (and 32) terms: sqrt(96) roundings of 2^-24 of the largest sum, with room.
        assert np.allclose(theirs, ours, atol=2.0**-24 * 64 * np.abs(x).max() * 8), name
        unrotated = x @ np.asarray(parts["weight"].qtensor.dequantize("float32")).T
        assert np.allclose(theirs, unrotated, atol=1e-2) == (name == "plain")


def test_a_rotation_needs_its_weights_and_inputs_turned():
    group = ct_transform.write({"a": 32})["config_groups"]["hadamard_32"]
    online, fused = group["apply"]

    def read(**changes):
        return ct_transform.read({"config_groups": {"g": {**group, **changes}}}, ct_config.matches)

    assert read()("a") == 32 and read()("b") is None
    assert read(apply=[online])("a") == 32  # the weights may be turned without a word
    assert read(apply=[{**online, "targets": ["re:.*_proj"], "ignore": ["x.o_proj"]}])("y.q_proj") == 32
    assert read(apply=[{**online, "targets": ["Linear"], "ignore": ["x.o_proj"]}])("x.o_proj") is None
    bad = {
        "not turned": dict(apply=[fused]),
        "others turned": dict(apply=[online, {**fused, "targets": ["b"]}]),
        "output": dict(apply=[{**online, "location": "output"}]),
        "random": dict(randomize=True),
        "matrix": dict(type="random-matrix"),
        "size": dict(head_dim=48),
        "no size": dict(head_dim=None),
        "apply": dict(apply={}),
        "targets": dict(apply=[{**online, "targets": "a"}]),
    }
    for changes in bad.values():
        with pytest.raises(CheckpointError, match=r"transform_config\.g"):
            read(**changes)
    twice = {"config_groups": {"g": group, "h": {**group, "head_dim": 16}}}
    with pytest.raises(CheckpointError, match="turns the input of a several times"):
        ct_transform.read(twice, ct_config.matches)("a")
    for config in ([], {"config_groups": []}, {"other": {}}):
        if config:
            with pytest.raises(CheckpointError, match="transform_config"):
                ct_transform.read(config, ct_config.matches)
