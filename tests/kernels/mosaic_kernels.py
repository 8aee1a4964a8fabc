"""The Mosaic GPU kernels with example arguments, for lowering and for compiling ahead of time (test_kernels_mosaic.py).

As a program: compiles the named kernels for an H200 or a B200 on this machine, with the CUDA plugin of JAX and a ptxas
(CUDA_HOME), and prints what ptxas says and which matrix instructions the PTX has, as JSON. It needs a process of its
own: flags of XLA and of Mosaic are read when JAX starts.
"""

import json
import os
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    DUMP = Path(tempfile.mkdtemp())
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # no cuDNN and the like is installed
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_TO": str(DUMP),
        "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={os.environ.get('CUDA_HOME', '/usr/local/cuda')} "
        "--xla_gpu_autotune_level=0",
    }

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from mxjax.core.formats import MXFP4, MXFP6_E2M3, NVFP4
from pallas_kernels.block_scaled_matmul import (
    Epilogue,
    PackedWeight,
    mosaic_decode,
    mosaic_fp4,
    mosaic_fused,
    mosaic_gpu,
    mosaic_unpack,
)
from pallas_kernels.block_scaled_matmul.fused_tiles import FusedConfig
from pallas_kernels.block_scaled_matmul.mosaic_decode import RowsConfig
from pallas_kernels.transform_quantize import Transform
from pallas_kernels.transform_quantize import mosaic_gpu as tq
from pallas_kernels.transform_quantize import mosaic_kronecker as tq_kronecker

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
B200 = AbstractDevice(device_kind="NVIDIA B200", num_cores=148, platform="gpu")
F8, BF16, F32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32


def shape(*dims, dtype=F32):
    return jax.ShapeDtypeStruct(dims, dtype)


def weight(n, k, layout):
    tiles, blocks = -(-n // 64), -(-k // 128)
    return PackedWeight(
        codes=shape(tiles, blocks, 34, 32, dtype=jnp.uint32), scales=None, row_scale=shape(tiles * 64),
        format=MXFP4, layout=layout, n=n, k=k,
    )  # fmt: skip


def rows(m, n, k, *config):
    fn = partial(mosaic_decode.rows_matmul, out_dtype=jnp.dtype(BF16), config=RowsConfig(*config))
    return lambda x, w, b: fn(x, w, b), (shape(m, k, dtype=BF16), weight(n, k, "bf16_fragments"), shape(n))


def whole(m, n, rank=0, function=None, parts=()):
    """A whole epilogue: bias, low-rank branch, function."""
    down = shape(m, rank * (1 + len(parts)), dtype=BF16)
    factors = dict(down=down, up=shape(n, rank, dtype=BF16)) if rank else {}
    return Epilogue(bias=shape(n), function=function, parts=parts, **factors)


def fused(fp8, m, n, k, *config, out=BF16, epilogue=Epilogue()):  # noqa: B008 (frozen)
    fn = partial(mosaic_fused.fused_matmul, out_dtype=jnp.dtype(out), config=FusedConfig(*config))
    if fp8:
        return fn, (shape(m, k, dtype=F8), shape(m), weight(n, k, "fp8_fragments"), epilogue)
    return lambda x, w, e: fn(x, None, w, e), (shape(m, k, dtype=BF16), weight(n, k, "bf16_fragments"), epilogue)


def unpack(layout):
    return partial(mosaic_unpack.unpack, cores=132), (weight(258, 576, layout),)


def quantize(m, k, t, fmt=MXFP4):
    config = tq.row_config(m, k, t, 132)
    return partial(tq.quantize_fp8, policy="even", config=config, cores=132, fmt=fmt), (shape(m, k, dtype=BF16), t)


def kronecker(m, k, left, right):
    t = Transform(left=shape(left, 4, 4), right=shape(right, 8, 8))
    return partial(tq_kronecker.quantize_fp8, policy="even", cores=132), (shape(m, k, dtype=BF16), t)


def fp8_product(m=300, n=500, k=576, config=mosaic_gpu.Fp8Config(), **epilogue):  # noqa: B008 (frozen)
    fn = partial(mosaic_gpu.fp8_matmul, out_dtype=jnp.dtype(BF16), n=n, config=config, cores=132)
    rows, columns = n + -n % 64, k + -k % 128
    operands = (shape(m, k, dtype=F8), shape(m), shape(rows, columns, dtype=F8), shape(rows))
    return fn, (*operands, whole(m, n, **epilogue))


def fp4_product(fmt, m, n, k, out=BF16):
    fn = partial(mosaic_fp4.fp4_matmul, out_dtype=jnp.dtype(out), config=mosaic_fp4.fp4_config(n))
    u8 = partial(shape, dtype=jnp.uint8)
    blocks = k // fmt.block_size
    row_scale = shape(n) if fmt is NVFP4 else None
    w = PackedWeight(
        codes=u8(n, k // 2), scales=u8(n, blocks), row_scale=row_scale, format=fmt, layout="rows", n=n, k=k
    )  # fmt: skip
    return fn, (u8(m, k // 2), u8(m, blocks), shape(m), w, shape(n))


H32 = Transform(hadamard=32)
# name: (function, arguments), what the PTX must contain, bytes of registers that may go to memory
KERNELS = {
    "rows_1": (rows(1, 8192, 8192, 4, 16, 2), r"mma\.sync\S*m16n8k16\S*bf16", 64),
    "rows_16": (rows(16, 8192, 8192, 4, 16, 1), r"mma\.sync\S*m16n8k16\S*bf16", 0),
    "rows_16_of_14336": (rows(16, 14336, 4096, 7, 16, 2), r"mma\.sync\S*m16n8k16\S*bf16", 384),
    "rows_tails": (rows(3, 258, 2880, 1, 16, 2), r"mma\.sync\S*m16n8k16\S*bf16", 0),
    "fp8_64": (fused(True, 64, 8192, 8192, 2, 64, 2), r"wgmma\S*m64n64k32\S*e4m3\.e4m3", 64),
    "fp8_256": (fused(True, 256, 8192, 8192, 2, 128), r"wgmma\S*m64n128k32\S*e4m3\.e4m3", 0),
    "fp8_512": (fused(True, 512, 8192, 8192, 2, 256, 1, 8, 1), r"wgmma\S*m64n256k32\S*e4m3\.e4m3", 0),
    "fp8_3_groups": (fused(True, 256, 12288, 3072, 3, 128), r"wgmma\S*m64n128k32\S*e4m3\.e4m3", 0),
    "fp8_tails": (fused(True, 33, 258, 576, 2, 40, out=F32), r"wgmma\S*m64n40k32\S*e4m3\.e4m3", 0),
    "bf16_32": (fused(False, 32, 8192, 8192, 4, 32, 4, 4, 1), r"wgmma\S*m64n32k16\S*bf16\.bf16", 0),
    "bf16_64": (fused(False, 64, 8192, 8192, 2, 64, 2), r"wgmma\S*m64n64k16\S*bf16\.bf16", 0),
    "bf16_128": (fused(False, 128, 8192, 8192, 2, 128, 2, 8, 1), r"wgmma\S*m64n128k16\S*bf16\.bf16", 0),
    "unpack_fp8": (unpack("fp8_fragments"), r"prmt", 0),
    "unpack_bf16": (unpack("bf16_fragments"), r"mul\.bf16x2", 0),
    "fp8_matmul": (fp8_product(), r"wgmma\S*e4m3\.e4m3", 0),
    "fp8_matmul_low_rank": (fp8_product(rank=64), r"wgmma\S*e4m3\.e4m3(?s:.*)wgmma\S*bf16", 0),
    # many tiles a block: what lives across the loop over tiles counts too
    "fp8_matmul_tiles": (fp8_product(4096, 12288, 3072), r"wgmma\S*e4m3\.e4m3", 0),
    "fp8_matmul_tiles_low_rank": (
        fp8_product(4096, 12288, 3072, rank=64, function="gelu_tanh"),
        r"(?s)(?=.*wgmma\S*e4m3\.e4m3).*wgmma\S*bf16",
        0,
    ),
    "fp8_matmul_tiles_low_ranks": (
        fp8_product(4096, 9216, 3072, rank=128, parts=(3072, 6144)),
        r"(?s)(?=.*wgmma\S*e4m3\.e4m3).*wgmma\S*bf16",
        0,
    ),
    "fp8_matmul_low_ranks": (fp8_product(rank=80, parts=(256,)), r"wgmma\S*e4m3\.e4m3(?s:.*)wgmma\S*bf16", 0),
    "fp8_matmul_gelu": (fp8_product(rank=128, function="gelu"), r"wgmma\S*bf16(?s:.*)ex2\.approx", 0),
    "fp8_matmul_narrow": (
        fp8_product(config=mosaic_gpu.Fp8Config(tile_m=128, tile_n=64), rank=48, function="gelu_tanh"),
        r"wgmma\S*bf16(?s:.*)ex2\.approx",
        0,
    ),
    "fp8_256_low_rank": (
        fused(True, 256, 8192, 8192, 2, 128, epilogue=whole(256, 8192, 64, "gelu_tanh")),
        r"wgmma\S*bf16",
        0,
    ),
    "fp8_1024_low_rank": (
        fused(True, 1024, 3072, 3072, 2, 256, 1, 8, 1, epilogue=whole(1024, 3072, 128)),
        r"wgmma\S*bf16",
        0,
    ),
    "fp8_3_groups_silu": (
        fused(True, 256, 12288, 3072, 3, 128, epilogue=whole(256, 12288, 32, "silu")),
        r"wgmma\S*bf16",
        0,
    ),
    "bf16_32_gather": (fused(False, 32, 8192, 8192, 4, 32, 4, 4, 1, 2), r"wgmma\S*m64n32k16\S*bf16\.bf16", 0),
    "bf16_64_gather": (fused(False, 64, 14336, 4096, 2, 64, 1, 8, 2, 2), r"wgmma\S*m64n64k16\S*bf16\.bf16", 0),
    "bf16_128_gather": (fused(False, 128, 8192, 8192, 2, 128, 2, 8, 1, 2), r"wgmma\S*m64n128k16\S*bf16\.bf16", 0),
    "bf16_3_gather": (fused(False, 33, 258, 576, 3, 40, 1, 8, 1, 2), r"wgmma\S*m64n40k16\S*bf16\.bf16", 0),
    "bf16_gelu": (
        fused(False, 33, 258, 576, 2, 40, epilogue=whole(33, 258, 16, "gelu")),
        r"wgmma\S*m64n40k16",
        0,
    ),
    "tq_hadamard": (quantize(4096, 8192, H32), r"(?s)mma\.sync\S*bf16.*cvt\.rn\.satfinite\.e4m3x2", 0),
    "tq_long": (quantize(4096, 14336, H32), r"(?s)mma\.sync\S*bf16.*cvt\.rn\.satfinite\.e4m3x2", 0),
    "tq_matrix": (quantize(4096, 8192, Transform(matrix=shape(32, 32))), r"mma\.sync\S*bf16", 0),
    "tq_fp6": (quantize(4096, 8192, H32, MXFP6_E2M3), r"(?s)mma\.sync\S*bf16.*cvt\.rn\.satfinite\.e4m3x2", 0),
    "tq_kronecker_3072": (kronecker(4096, 3072, 48, 8), r"(?s)fma\.rn\.f32.*cvt\.rn\.satfinite\.e4m3x2", 0),
    "tq_kronecker_15360": (kronecker(3584, 15360, 160, 60), r"(?s)fma\.rn\.f32.*cvt\.rn\.satfinite\.e4m3x2", 0),
    "tq_kronecker_tails": (kronecker(3, 1152, 18, 1), r"(?s)fma\.rn\.f32.*cvt\.rn\.satfinite\.e4m3x2", 0),
    "tq_scale": (quantize(33, 2880, Transform(channel_scale=shape(2880, dtype=BF16))), r"cvt\.rn\.satfinite", 0),
}
BLACKWELL = {  # the same for a B200: codes are multiplied by codes, two and four scales a step of 64 values
    "fp4_mxfp4": (
        fp4_product(MXFP4, 4096, 4096, 4096),
        r"tcgen05\.mma\S*kind::mxf4(?:nvf4)?\.block_scale\.scale_vec::2X",
        0,
    ),
    "fp4_nvfp4": (
        fp4_product(NVFP4, 4096, 4096, 4096),
        r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale\.scale_vec::4X",
        0,
    ),
    "fp4_tails": (fp4_product(NVFP4, 33, 258, 576, out=F32), r"tcgen05\.mma\S*block_scale\.scale_vec::4X", 0),
    "fp4_small": (fp4_product(MXFP4, 1, 64, 32), r"tcgen05\.mma\S*block_scale\.scale_vec::2X", 0),
}
KERNELS |= BLACKWELL


def device(name):
    return B200 if name in BLACKWELL else H200


def lower(name):
    fn, args = KERNELS[name][0]
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device(name))):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))


TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H200"
"""
BLACKWELL_TARGET = (
    TARGET.replace("capability { major: 9", "capability { major: 10")
    .replace("core_count: 132", "core_count: 148")
    .replace("NVIDIA H200", "NVIDIA B200")
)


def compile_all():
    """name -> {"ptx", "spilled", "serialized"} for every kernel, compiled for a GPU that is not here.

    The kernels of one kind of GPU: the compiler keeps the first one's architecture.
    """
    from jax.experimental import topologies

    target = BLACKWELL_TARGET if all(name in BLACKWELL for name in KERNELS) else TARGET
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", topology="1x1x1", target_config=target)
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    out, seen = {}, set()
    for name, ((fn, args), instruction, _) in KERNELS.items():
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=device(name))):
            jax.jit(fn, in_shardings=sharding, out_shardings=sharding).lower(*args).compile()
        new = set(DUMP.iterdir()) - seen
        seen |= new
        ptx = "".join(p.read_text() for p in new if p.suffix == ".ptx")
        report = "".join(p.read_text() for p in new if p.suffix == ".ptxas")
        out[name] = {
            "found": bool(re.search(instruction, ptx)),
            "matrix": sorted(set(re.findall(r"(?:wgmma|mma)\S*m\d+n\d+k\d+\S*", ptx))),
            "spilled": sum(int(n) for n in re.findall(r"(\d+) bytes spill", report)),
            "registers": [int(n) for n in re.findall(r"Used (\d+) registers", report)],
            "serialized": "serialized" in report,
        }
    return out


if __name__ == "__main__":
    wanted = sys.argv[1:] or [name for name in KERNELS if name not in BLACKWELL]  # names, or all of the H200
    KERNELS = {name: KERNELS[name] for name in wanted}
    json.dump(compile_all(), sys.stdout)
