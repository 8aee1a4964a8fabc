"""Two processes of one program, each with two of the four devices of a mesh. Run by test_sharding_processes.py.

python two_processes.py PORT INDEX FOLDER
"""

import contextlib
import hashlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mxjax
from mxjax.core import processes
from mxjax.errors import CheckpointError, NonFiniteError
from mxjax.io import safetensors

RULES = {"up": {"kernel": P("data", "model")}, "down": {"kernel": P("model", "data")}, "norm": {"scale": P()}}
RECIPES = ("nvfp4", "gptq_nvfp4")


def params():
    rng = np.random.default_rng(0)
    up, down = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 128), (128, 64)))
    return {"up": {"kernel": up}, "down": {"kernel": down}, "norm": {"scale": np.ones(64, np.float32)}}


def batches():
    rng = np.random.default_rng(1)  # eighths: sums of their products are exact in any order
    return [rng.integers(-8, 9, (8, 16, 64)).astype(np.float32) / 8 for _ in range(2)]


def model(params, x):
    return mxjax.qdot(x, params["up"]["kernel"])[..., :64] + mxjax.qdot(jnp.tile(x, 2), params["down"]["kernel"])


def named_shapes():
    return {f"{name}.weight": branch["kernel"] for name, branch in params().items() if "kernel" in branch}


@contextlib.contextmanager
def counted_reads():
    """Bytes taken out of the memory map of each tensor; each slice once, though two devices may hold it."""
    seen, read = {}, safetensors.Entry.read

    class Map(np.ndarray):
        name = ""

        def __array_finalize__(self, other):
            self.name = getattr(other, "name", "")

        def __getitem__(self, at):
            out = super().__getitem__(at)
            seen.setdefault(self.name, {})[str(at)] = out.nbytes
            return out

    def recorded(entry):
        out = read(entry).view(Map)
        out.name = entry.name
        return out

    safetensors.Entry.read = recorded
    counts = {}
    yield counts
    safetensors.Entry.read = read
    counts |= {name: sum(slices.values()) for name, slices in seen.items()}


def main(port, index, folder):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_disable_most_optimizations", True)  # here and in the test: half the time to compile
    at = {"num_processes": 2, "process_id": index, "heartbeat_timeout_seconds": 300}  # on a machine that has other work
    jax.distributed.initialize(f"127.0.0.1:{port}", **at)
    assert jax.device_count() == 4 and jax.local_device_count() == 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharded = mxjax.sharding.shard(params(), mesh, RULES)
    rows = NamedSharding(mesh, P("data"))
    data = [jax.make_array_from_callback(x.shape, rows, lambda i, x=x: x[i]) for x in batches()]
    for recipe in RECIPES:
        stats = mxjax.calibrate(model, sharded, data, recipe) if "_" in recipe else None
        quantized = mxjax.quantize(sharded, recipe, stats)
        codes = quantized["up"]["kernel"].qtensor.codes
        assert codes.sharding.spec == P("model", "data") and not codes.is_fully_addressable
        mxjax.save(folder / recipe, quantized, format="orbax")
        mxjax.save(folder / f"{recipe}-safetensors", quantized)
    mxjax.save(folder / "ct", mxjax.quantize(sharded, "mxfp4_a16"), format="compressed-tensors")
    assert mxjax.summary(quantized).bits_per_weight < 4.51  # 4.5, and a tensor scale

    y = jax.jit(model)(quantized, data[0])
    print("y", hashlib.sha256(processes.on_host(y).tobytes()).hexdigest())

    again = mxjax.load(folder / "nvfp4", mesh=mesh, specs=RULES)  # restored by both
    assert again["up"]["kernel"].qtensor.codes.sharding == codes.sharding

    # A float checkpoint that neither could hold: each reads its own half of every weight, and quantizes that.
    if index == 0:
        (folder / "float").mkdir()
        (folder / "float" / "config.json").write_text("{}")
        turned = {name: np.ascontiguousarray(x.T) for name, x in named_shapes().items()}
        safetensors.write(folder / "float" / "model.safetensors", turned)
    processes.one_for_all(lambda: None)  # the second waits for the first
    with counted_reads() as seen:
        given = {"mesh": mesh, "specs": {k: RULES[k] for k in ("up", "down")}}
        halves = mxjax.load(folder / "float", names=lambda name: name.replace(".weight", "/kernel"), **given)
    assert seen == {name: x.nbytes // 2 for name, x in named_shapes().items()}
    assert set(jax.tree.leaves(jax.tree.map(lambda x: x.is_fully_addressable, halves))) == {False}
    mxjax.save(folder / "streamed", mxjax.quantize(halves, "nvfp4"), format="orbax")
    # What fails in one process fails in all, and nobody waits for ever.
    bad = mxjax.sharding.shard({"a": {"kernel": np.full((64, 8), np.nan, np.float32)}}, mesh, P(None, "model"))
    for recipe in ("mxfp4", "loraq_mxfp4"):
        try:
            mxjax.quantize(bad, recipe)
            raise AssertionError("NaN was quantized")
        except NonFiniteError as e:
            print(type(e).__name__)
    try:
        mxjax.save(folder / "nvfp4", quantized, format="orbax")
        raise AssertionError("a folder was overwritten")
    except CheckpointError as e:
        print(type(e).__name__)
    print("done")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
