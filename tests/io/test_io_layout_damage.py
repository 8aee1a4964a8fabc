"""Damaged Quark and ModelOpt folders: an error that names the tensor and the file, and never a default."""

import copy
import json
import random

import numpy as np
import pytest
from io_cases import INTEROP, PEERS, config_of
from test_io_fp_quant import folder_of as folder_of_fp_quant
from test_io_gpt_oss import folder_of as folder_of_gpt_oss

import mxjax
from mxjax.errors import CheckpointError, MxjaxError
from mxjax.io import safetensors as st

WEIGHTS, SECOND = "model.safetensors", "hf_quant_config.json"
FOLDERS = {"modelopt": INTEROP / "modelopt_nvfp4", "quark": INTEROP / "quark_mxfp4"}
DOWN = "model.layers.0.mlp.down_proj"


def tensors_of(folder):
    return {n: np.array(e.read()) for n, e in st.read(folder / WEIGHTS).items()}


def tensor(name, change):
    """A change of one tensor: a new array or a function of the old one; None deletes it."""

    def apply(tensors, files):
        new = change(tensors.get(name)) if callable(change) else change
        tensors.pop(name, None)
        if new is not None:
            tensors[name] = np.ascontiguousarray(new) if np.ndim(new) else new

    return apply


def entry(*keys, value, file="config.json"):
    """A change of one value of a JSON file."""

    def apply(tensors, files):
        node = files[file]
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = value

    return apply


Q = "quantization_config"
WEIGHT, INPUT = (Q, "global_quant_config", "weight"), (Q, "global_quant_config", "input_tensors")
CASES = {
    "modelopt": {
        "no weight": (tensor(f"{DOWN}.weight", None), f"{DOWN}: weight is missing"),
        "no block scale": (tensor(f"{DOWN}.weight_scale", None), rf"{DOWN}\.weight_scale is missing"),
        "no tensor scale": (tensor(f"{DOWN}.weight_scale_2", None), rf"{DOWN}\.weight_scale_2 is missing"),
        "no input scale": (tensor(f"{DOWN}.input_scale", None), rf"{DOWN}\.input_scale is missing"),
        "float weight": (tensor(f"{DOWN}.weight", np.ones((64, 128), np.float32)), rf"{DOWN}\.weight in .*float32"),
        "tensor scale [1]": (
            tensor(f"{DOWN}.weight_scale_2", np.ones(1, np.float32)),
            r"weight_scale_2 in .*\(1,\), not",
        ),
        "tensor scale 0": (tensor(f"{DOWN}.weight_scale_2", np.float32(0)), "weight_scale_2 in .*0.0 is no global"),
        "input scale nan": (tensor(f"{DOWN}.input_scale", np.float32(np.nan)), "input_scale in .*nan is no global"),
        "input scale f64": (tensor(f"{DOWN}.input_scale", np.float64(1)), "input_scale in .*float64"),
        "scales as bytes": (tensor(f"{DOWN}.weight_scale", lambda x: x.view(np.uint8)), "weight_scale in .*uint8"),
        "scales cut": (tensor(f"{DOWN}.weight_scale", lambda x: x[:, :-1]), r"weight_scale in .*\(64, 7\), not"),
        "awq": (tensor(f"{DOWN}.pre_quant_scale", np.ones(128, np.float32)), "pre_quant_scale in .*no tensor that"),
        "kv scale": (tensor("model.x.k_scale", np.ones(3, np.uint8)), "k_scale in .*unknown tensor"),
        "ignored": (entry(Q, "ignore", value=["*.mlp.*"]), "hf_quant_config.json says"),
        "algorithm": (entry(Q, "quant_algo", value="NVFP4_AWQ"), "hf_quant_config.json says"),
        "second file": (entry("quantization", value=[], file=SECOND), "hf_quant_config.json: no object 'quantization'"),
        "mixed": (entry(Q, "quantized_layers", value={"a": {}}), "quantized_layers is not what"),
        "kv cache": (entry(Q, "kv_cache_scheme", value={"num_bits": 8}), "KV cache"),
        "group size": (
            entry(Q, "config_groups", "group_0", "weights", "group_size", value=32),
            "group_size '32'; NVFP4",
        ),
        "ignore text": (entry(Q, "ignore", value="lm_head"), "hf_quant_config.json says|list of names"),
    },
    "quark": {
        "no weight": (tensor(f"{DOWN}.weight", None), f"{DOWN}: weight is missing"),
        "no scale": (tensor(f"{DOWN}.weight_scale", None), rf"{DOWN}\.weight_scale is missing"),
        "partial tail": (tensor(f"{DOWN}.weight", lambda x: x[:, :-4]), "multiple of 32"),
        "scales of 16": (
            tensor(f"{DOWN}.weight_scale", lambda x: np.repeat(x, 2, 1)),
            r"\(64, 8\), not uint8 \(64, 4\)",
        ),
        "e4m3 scales": (
            tensor(f"{DOWN}.weight_scale", lambda x: x.view(st.DTYPES["F8_E4M3"])),
            "weight_scale in .*float8",
        ),
        "tensor scale": (tensor(f"{DOWN}.weight_scale_2", np.float32(1)), "weight_scale_2 in .*no such tensor"),
        "zero point": (tensor(f"{DOWN}.weight_zero_point", np.ones(3)), "weight_zero_point in .*no tensor that"),
        "excluded": (
            entry(Q, "exclude", value=["*down_proj"]),
            "config does not quantize model.layers.0.mlp.down_proj",
        ),
        "excluded by regex": (entry(Q, "exclude", value=["re:.*down"]), "config does not quantize"),
        "bad regex": (entry(Q, "exclude", value=["re:("]), "no regular expression"),
        "exclude text": (entry(Q, "exclude", value="lm_head"), "list of names"),
        "int4": (entry(*WEIGHT, "dtype", value="int4"), "mxjax reads fp4"),
        "dtype list": (entry(*WEIGHT, "dtype", value=["fp4"]), "mxjax reads fp4"),
        "nvfp4 spec": (entry(*WEIGHT, value=[{}, {}]), r"weight\[0\]: dtype is 'None'"),
        "three specs": (entry(*WEIGHT, value=[{}, {}, {}]), "as a pair"),
        "group": (entry(*WEIGHT, "group_size", value=16), "group_size is '16', not 32"),
        "float scales": (entry(*WEIGHT, "scale_format", value="float32"), "scale_format is 'float32'"),
        "static inputs": (entry(*INPUT, "is_dynamic", value=False), "is_dynamic is 'False'"),
        "outputs": (entry(Q, "global_quant_config", "output_tensors", value={"dtype": "fp8"}), "output_tensors is set"),
        "no global": (entry(Q, "global_quant_config", value=None), "config does not quantize"),
        "global text": (entry(Q, "global_quant_config", value="fp4"), "is no object"),
        "no export": (entry(Q, "export", value=None), "weight_format"),
        "fake": (entry(Q, "export", "weight_format", value="fake_quantized"), "weight_format"),
        "order": (entry(Q, "export", "pack_method", value="order"), "pack_method 'order'"),
        "kv": (entry(Q, "kv_cache_quant_config", value={"a": 1}), "kv_cache_quant_config is set"),
        "layers": (entry(Q, "layer_quant_config", value=[1]), "layer_quant_config is no object"),
        "by type": (entry(Q, "layer_type_quant_config", value={"Linear": {}}), "layer_type_quant_config is set"),
        "method": (entry(Q, "quant_method", value="awq"), "quant_method 'awq'; mxjax reads"),
    },
}


@pytest.mark.parametrize("layout, case", [(layout, case) for layout in CASES for case in CASES[layout]])
def test_damaged_folder(tmp_path, layout, case):
    change, message = CASES[layout][case]
    tensors = tensors_of(FOLDERS[layout])
    files = {p.name: json.loads(p.read_text()) for p in FOLDERS[layout].glob("*.json")}
    change(tensors, files)
    st.write(tmp_path / WEIGHTS, tensors)
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match=message):
        mxjax.load(tmp_path)


def test_a_named_layer_must_be_packed(tmp_path):
    """Quark's layer_quant_config and ModelOpt's quantized_layers name modules: a float weight there is an error."""
    for layout, folder in FOLDERS.items():
        tensors, config = tensors_of(folder), config_of(folder)
        quantization = config[Q]
        if layout == "quark":
            quantization["layer_quant_config"] = {"lm_head": quantization["global_quant_config"]}
            quantization["exclude"] = []
        else:
            names = {n.removesuffix(".weight_scale_2") for n in tensors if n.endswith("_scale_2")}
            layers = {n: {"quant_algo": "NVFP4", "group_size": 16} for n in [*names, "lm_head"]}
            quantization |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": []}
        out = tmp_path / layout
        out.mkdir()
        st.write(out / WEIGHTS, tensors)
        (out / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=r"lm_head\.weight in .*bfloat16, but the config quantizes it"):
            mxjax.load(out)


JUNK = (None, [], {}, "", "x", "re:(", "re:.*", "*", 0, -1, 3.5, 1e308, True, [None], [[]], {"a": {}}, ["Linear"],
        2**70, "\ud800", "NVFP4", "fp4", {"weights": None}, [{}, {}], "a" * 300)  # fmt: skip
STRANGE = ("x", "a.b.c", "model.layers", f"{DOWN}.weight_scale_2", "z_blocks", "z.scales", "..", "lm_head.qweight")


def places(node, keys=()):
    """Keys that lead to every value of a JSON object."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*keys, key)
        yield from places(value, (*keys, key))


def damage_config(rng, files):
    file = files[rng.choice(sorted(files))]
    keys = rng.choice([k for k in places(file) if k[0] in (Q, "quantization", "dtype")] or [("dtype",)])
    node = file
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = copy.deepcopy(rng.choice(JUNK))


def damage_tensor(rng, tensors):
    name = rng.choice(sorted(tensors))
    x = np.atleast_1d(tensors[name])
    change = rng.choice(
        [
            lambda: tensors.pop(name),
            lambda: tensors.update({name: np.zeros((), np.float32)}),
            lambda: tensors.update({name: x.reshape(-1)}),
            lambda: tensors.update({name: np.ascontiguousarray(x.view(np.uint8))}),
            lambda: tensors.update({name: np.ascontiguousarray(x[..., :1])}),
            lambda: tensors.update({rng.choice(STRANGE): x}),
            lambda: tensors.update({name: x[:0]}),
            lambda: tensors.update({name: np.full(x.shape, 255, np.uint8).astype(x.dtype)}),
        ]
    )
    change()


@pytest.mark.filterwarnings("ignore:.*must rotate:mxjax.errors.MxjaxWarning")
def test_random_damage_of_every_layout(tmp_path):
    """Values of the configs and tensors replaced at random: it loads, or the error is ours."""
    gpt_oss, fp_quant, rotated = (tmp_path / name for name in ("gpt_oss", "fp_quant", "rotated"))
    folder_of_gpt_oss(gpt_oss)
    folder_of_fp_quant(fp_quant)
    rule = mxjax.Rule(weight="mxfp4", axis=-1, transform=mxjax.transforms.Hadamard(32))
    w = mxjax.quantize({"a": {"weight": np.ones((8, 64), np.float32)}}, mxjax.QuantConfig(rules=[rule]))
    mxjax.save(rotated, w, "compressed-tensors")
    sources = [*FOLDERS.values(), *PEERS.values(), gpt_oss, fp_quant, rotated]
    rng, errors, cases = random.Random(0), 0, 500
    for i in range(cases):
        folder = sources[i % len(sources)]
        files = {p.name: json.loads(p.read_text()) for p in folder.glob("*.json")}
        tensors = tensors_of(folder)
        for _ in range(rng.randint(1, 2)):
            damage_config(rng, files) if rng.random() < 0.6 else damage_tensor(rng, tensors)
        out = tmp_path / f"out{i}"
        out.mkdir()
        st.write(out / WEIGHTS, tensors)
        for name, value in files.items():
            (out / name).write_text(json.dumps(value))
        try:
            mxjax.load(out, shardings=mxjax.io.HOST)
        except MxjaxError:
            errors += 1
    assert cases / 3 < errors < cases  # most are damage; some values do not matter


@pytest.mark.parametrize("layout", FOLDERS)
def test_random_damage(tmp_path, layout):
    """Bytes of the header or of the configs changed at random: it loads, or the error is ours."""
    rng = random.Random(0)
    files = {p.name: p.read_bytes() for p in FOLDERS[layout].iterdir()}
    header = int.from_bytes(files[WEIGHTS][:8], "little") + 8
    errors = 0
    for i in range(120):
        victim = sorted(files)[i % len(files)]
        for name, data in files.items():
            data = bytearray(data)
            for _ in range(3 if name == victim else 0):
                data[rng.randrange(header if name == WEIGHTS else len(data))] = rng.choice(b'0123456789{}[],:"aZ\xff\0')
            (tmp_path / name).write_bytes(data)
        try:
            mxjax.load(tmp_path, shardings=mxjax.io.HOST)
        except MxjaxError:
            errors += 1
    assert errors > 50
