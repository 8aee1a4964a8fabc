"""Two processes of one program, each with two of the four devices of a mesh. Run by test_sharding_processes.py.

python two_processes.py PORT INDEX FOLDER
"""

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

RULES = {"up": {"kernel": P("data", "model")}, "down": {"kernel": P("model", "data")}, "norm": {"scale": P()}}
RECIPES = ("nvfp4", "gptq_nvfp4", "wush_mxfp4")


def params():
    rng = np.random.default_rng(0)
    up, down = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 128), (128, 64)))
    return {"up": {"kernel": up}, "down": {"kernel": down}, "norm": {"scale": np.ones(64, np.float32)}}


def batches():
    rng = np.random.default_rng(1)  # eighths: sums of their products are exact in any order
    return [rng.integers(-8, 9, (8, 16, 64)).astype(np.float32) / 8 for _ in range(2)]


def model(params, x):
    return mxjax.qdot(x, params["up"]["kernel"])[..., :64] + mxjax.qdot(jnp.tile(x, 2), params["down"]["kernel"])


def main(port, index, folder):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_disable_most_optimizations", True)  # here and in the test: half the time to compile
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
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
    assert "2.25 bits" not in str(mxjax.summary(quantized))

    y = jax.jit(model)(quantized, data[0])
    print("y", hashlib.sha256(processes.on_host(y).tobytes()).hexdigest())

    again = mxjax.load(folder / "nvfp4", mesh=mesh, specs=RULES)  # restored by both
    assert again["up"]["kernel"].qtensor.codes.sharding == codes.sharding
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
