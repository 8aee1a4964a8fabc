"""Every kernel lowered for GPUs that are not here, and compiled to machine code whose matrix instruction is read.

Lowering needs JAX alone (an abstract device). Machine code comes from the ``triton`` package, which compiles for AMD
and NVIDIA on any machine; registers, spills and shared memory are read from the result.
"""

import functools
import re
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from mxjax.algorithms.observers import round_unit
from mxjax.core.formats import MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, NVFP4
from pallas_kernels import _compat
from pallas_kernels.block_scaled_matmul import (
    FUNCTIONS,
    Epilogue,
    PackedWeight,
    triton,
    triton_generic,
    triton_unpack,
)
from pallas_kernels.block_scaled_matmul.layout import TILE_K, TILE_N
from pallas_kernels.round_columns.triton import round_columns
from pallas_kernels.transform_quantize import Transform
from pallas_kernels.transform_quantize import branch as tq_branch
from pallas_kernels.transform_quantize import low_rank as tq_low_rank
from pallas_kernels.transform_quantize import triton as tq
from pallas_kernels.transform_quantize.pair import pair_of_codes

TARGETS = {  # JAX platform, device name, triton backend, architecture, threads a warp, bytes of shared memory a block
    "gfx942": ("rocm", "gfx942", "hip", "gfx942", 64, 65536),
    "gfx950": ("rocm", "gfx950", "hip", "gfx950", 64, 163840),
    "sm_80": ("cuda", "NVIDIA A100", "cuda", 80, 32, 166912),
    "sm_90": ("cuda", "NVIDIA H200", "cuda", 90, 32, 232448),
    "sm_100": ("cuda", "NVIDIA B200", "cuda", 100, 32, 232448),
    "sm_120": ("cuda", "NVIDIA RTX PRO 6000", "cuda", 120, 32, 101376),
}


def shape(*dims, dtype=jnp.uint8):
    return jax.ShapeDtypeStruct(dims, dtype)


def bf16(m, k):
    return shape(m, k, dtype=jnp.bfloat16)


def rows(n, k, fmt):
    return PackedWeight(
        codes=shape(n, fmt.packed_size(k)), scales=shape(n, k // fmt.block_size),
        row_scale=None, format=fmt, layout="rows", n=n, k=k,
    )  # fmt: skip


def tiles(n, k):
    t, padded = -(-k // TILE_K), -(-n // TILE_N) * TILE_N
    return PackedWeight(
        codes=shape(t, padded, 64), scales=shape(t, padded, 4), row_scale=shape(padded, dtype=jnp.float32),
        format=MXFP4, layout="tiles", n=n, k=k,
    )  # fmt: skip


def quantize(fmt, t, rounding="floats"):
    scale = shape(256, dtype=jnp.float32) if fmt.has_tensor_scale else None
    return partial(tq.quantize, fmt=fmt, policy="even", rounding=rounding), (bf16(256, 2880), t, scale)


def generic(x_fmt, w_fmt, m, native):
    k = 1024
    x = bf16(m, k) if x_fmt is None else shape(m, x_fmt.packed_size(k))
    x_scales = None if x_fmt is None else shape(m, k // x_fmt.block_size)
    config = triton_generic.generic_config(m, 512, native)
    fn = partial(triton_generic.generic, x_fmt=x_fmt, out_dtype=jnp.bfloat16, config=config, native=native)
    return (lambda x, xs, w: fn(x, xs, None, w, Epilogue())), (x, x_scales, rows(512, k, w_fmt)), config


def generic_with(m, x_dtype=jnp.bfloat16, fmt=MXFP4, k=1024, **epilogue):
    """A product of x as it is, with an epilogue; float8 x comes with a scale a row and multiplies MXFP4 in FP8."""
    config = triton_generic.generic_config(m, 512, False)
    x_scale = shape(m, dtype=jnp.float32) if x_dtype in triton_generic.FP8_DTYPES else None
    fn = partial(triton_generic.generic, x_fmt=None, out_dtype=jnp.bfloat16, config=config)
    args = (shape(m, k, dtype=x_dtype), x_scale, rows(512, k, fmt), Epilogue(**epilogue))
    return (lambda x, s, w, e: fn(x, None, s, w, e)), args, config.num_warps, config.num_stages


def low_rank(fmt, rank, m):
    config = tq_low_rank.low_rank_config(m, 2880, 132)
    scale = shape(m, dtype=jnp.float32) if fmt.has_tensor_scale else None
    fn = partial(tq_low_rank.quantize_low_rank, fmt=fmt, policy="even", config=config)
    return fn, (bf16(m, 2880), bf16(rank, 2880), H32, scale), config.num_warps, config.num_stages


def branch(rank, m):
    config = tq_branch.branch_config(m, 2880, 132)
    fn = partial(tq_branch.quantize_and_project, fmt=MXFP8_E4M3, policy="even", config=config)
    return fn, (bf16(m, 2880), bf16(rank, 2880)), config.num_warps, config.num_stages


def grouped(x_fmt, w_fmt, m, native):
    """Experts of 512 x 1024 with 64 rows each on average."""
    fn, (x, x_scales, w), config = generic(x_fmt, w_fmt, m, native)
    stack = replace(w, codes=shape(4, *w.codes.shape), scales=shape(4, *w.scales.shape))
    config = triton_generic.generic_config(m // 4, 512, native)
    fn = partial(triton_generic.grouped, x_fmt=x_fmt, out_dtype=jnp.bfloat16, config=config, native=native)
    table = (shape(m // config.block_m + 5, dtype=jnp.int32),) * 3
    return (lambda x, xs, w, t: fn(x, xs, None, w, t, None)), (x, x_scales, stack, table), config


def columns(fmt):
    bs = fmt.block_size
    f32 = partial(shape, dtype=jnp.float32)
    return partial(round_columns, rounder=partial(round_unit, fmt=fmt)), (f32(bs, 576), f32(bs, bs), shape(bs, 576))


H32 = Transform(hadamard=32)
KERNELS = {  # name: (function, arguments, warps, stages)
    "tq_mxfp4": (*quantize(MXFP4, H32), 4, 1),
    "tq_mxfp8": (*quantize(MXFP8_E4M3, H32, "casts"), 4, 1),
    "tq_nvfp4": (*quantize(NVFP4, Transform()), 4, 1),
    "tq_per_block": (*quantize(MXFP4, Transform(matrix=shape(90, 32, 32, dtype=jnp.float32))), 4, 1),
    "tq_row_fp8": (partial(tq.quantize_fp8, policy="even"), (bf16(256, 4096), H32), 2, 1),
    "tq_row_bf16": (partial(tq.quantize_fp8, policy="even", dtype=jnp.bfloat16), (bf16(16, 2880), H32), 2, 1),
    "unpack": (partial(triton.unpack, dtype=jnp.float8_e4m3fn), (tiles(258, 576),), 4, 1),
    "columns_mxfp4": (*columns(MXFP4), 1, 1),
    "columns_nvfp4": (*columns(NVFP4), 1, 1),
}
for m in (16, 64):
    config = triton.DecodeConfig(m, 2)
    decode = partial(triton.decode, out_dtype=jnp.bfloat16, config=config)
    KERNELS[f"decode_{m}"] = (
        decode,
        (bf16(m, 2880), None, tiles(258, 2880), None),
        config.num_warps,
        config.num_stages,
    )
for name, args in {
    "w4a4_native": (MXFP4, MXFP4, 128, True),
    "w4a8_native": (MXFP8_E4M3, MXFP4, 128, True),
    "w4a4": (MXFP4, MXFP4, 64, False),
    "w4a16": (None, MXFP4, 16, False),
    "w4a16_nvfp4": (None, NVFP4, 64, False),
    "w6a16": (None, MXFP6_E3M2, 16, False),
    "w6a6": (MXFP6_E2M3, MXFP6_E2M3, 64, False),
}.items():
    fn, operands, config = generic(*args)
    KERNELS[name] = (fn, operands, config.num_warps, config.num_stages)

for name, args in {
    "grouped_w4a16": (None, MXFP4, 128, False),
    "grouped_w4a4": (MXFP4, MXFP4, 256, False),
    "grouped_w4a4_native": (MXFP4, MXFP4, 512, True),
}.items():
    fn, operands, config = grouped(*args)
    KERNELS[name] = (fn, operands, config.num_warps, config.num_stages)

for function in FUNCTIONS:
    bias, down, up = shape(512, dtype=jnp.float32), bf16(64, 48), bf16(512, 48)
    KERNELS[f"epilogue_{function}"] = generic_with(64, bias=bias, down=down, up=up, function=function)
KERNELS |= {
    "fp8_fnuz": generic_with(128, jnp.float8_e4m3fnuz),
    "fp8_fnuz_tails": generic_with(3, jnp.float8_e4m3fnuz, k=576),  # rows and columns of x that do not exist
    "fp8_fn": generic_with(128, jnp.float8_e4m3fn),
    "tq_row_fnuz": (partial(tq.quantize_fp8, policy="even", dtype=jnp.float8_e4m3fnuz), (bf16(256, 4096), H32), 2, 1),
    "tq_low_rank_mxfp4": low_rank(MXFP4, 64, 4096),
    "tq_low_rank_nvfp4": low_rank(NVFP4, 33, 16),
    "tq_branch": branch(64, 4096),
    "tq_pair": (pair_of_codes, (shape(256, 1440), shape(256, 90)), 4, 1),
    "w6_unpack": (triton_unpack.unpack_rows, (rows(258, 2880, MXFP6_E2M3),), 4, 1),
    "tq_row_fp6": (partial(tq.quantize_fp8, policy="even", fmt=MXFP6_E3M2), (bf16(256, 4096), H32), 2, 1),
    "w6_fp8": generic_with(64, jnp.float8_e4m3fn, fmt=MXFP6_E2M3),
    "w6_fnuz": generic_with(64, jnp.float8_e4m3fnuz, fmt=MXFP6_E3M2),
}

AMD_ONLY = ("fp8_fnuz", "fp8_fnuz_tails", "tq_row_fnuz", "w6_fnuz")  # NVIDIA has no e4m3fnuz
NVIDIA_ONLY = ("decode_16", "decode_64", "unpack")  # PTX inside


@functools.cache  # JAX caches a lowering too, and would not call Pallas again
def triton_ir(name, target):
    platform, kind = TARGETS[target][:2]
    fn, args = KERNELS[name][:2]
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)), _compat.capture_triton_ir() as captured:
        jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,))
    (ir,) = captured
    return ir


@pytest.mark.parametrize("target", ["gfx942", "sm_90"])
@pytest.mark.parametrize("name", KERNELS)
def test_lowers_without_a_gpu(name, target):
    if name in AMD_ONLY and not target.startswith("gfx"):
        return  # test_machine_code compiles them for the one chip that has the format
    if name in NVIDIA_ONLY and target.startswith("gfx"):
        with pytest.raises(Exception, match=r"(?i)inline_asm|not supported|asm"):
            assert "elementwise_inline_asm" not in triton_ir(name, target), (
                "inline_asm: PTX would reach an AMD compiler"
            )
    else:
        assert "tt.func" in triton_ir(name, target)


MATRIX_INSTRUCTIONS = [  # kernel, target, what the machine code must contain
    ("tq_mxfp4", "gfx942", r"v_mfma_f32_\w+bf16"),
    ("tq_mxfp4", "gfx950", r"v_mfma_f32_\w+bf16"),
    ("tq_mxfp4", "sm_80", r"mma\.sync\S*\.f32\.bf16\.bf16"),
    ("tq_mxfp4", "sm_120", r"mma\.sync\S*\.f32\.bf16\.bf16"),
    ("tq_mxfp8", "sm_90", r"cvt\.rn\.satfinite\.e4m3x2"),
    ("tq_row_fp8", "sm_90", r"(?s)mma\S*bf16.*cvt\.rn\.satfinite\.e4m3x2"),
    ("tq_row_fp8", "sm_100", r"cvt\.rn\.satfinite\.e4m3x2"),
    ("tq_row_bf16", "gfx942", r"v_mfma_f32_\w+bf16"),
    ("tq_per_block", "sm_100", r"tcgen05\.mma|mma\.sync"),
    ("unpack", "sm_90", r"cvt\.rn\.satfinite\.e4m3x2"),
    ("decode_16", "sm_80", r"mma\.sync\S*m16n8k16\S*bf16"),
    ("decode_16", "sm_90", r"mma\.sync\S*m16n8k16\S*bf16"),
    ("decode_64", "sm_90", r"wgmma\.mma_async\S*bf16\.bf16"),
    ("w4a4_native", "gfx950", r"v_mfma_scale_f32_\w+f8f6f4"),
    ("w4a4_native", "sm_100", r"tcgen05\.mma\S*kind::mxf4"),
    ("w4a4_native", "sm_120", r"mma\.sync\S*kind::mxf4"),
    ("w4a8_native", "gfx950", r"v_mfma_scale_f32_\w+f8f6f4"),
    ("w4a8_native", "sm_100", r"tcgen05\.mma\S*kind::mxf8f6f4"),
    ("w4a8_native", "sm_120", r"mma\.sync\S*bf16"),  # Triton decodes mixed pairs there
    ("w4a4", "gfx942", r"v_mfma_f32_\w+bf16"),
    ("w4a16", "gfx950", r"v_mfma_f32_\w+bf16"),
    ("w4a16_nvfp4", "sm_90", r"wgmma\.mma_async\S*bf16"),
    ("w4a16", "sm_100", r"mma\.sync\S*bf16|tcgen05\.mma"),
    ("columns_mxfp4", "sm_80", r"sub\S*\.f32|fma\.rn\.f32"),  # no matrix product: one warp, registers not spilled
    ("columns_nvfp4", "sm_90", r"fma\.rn\.f32"),
    ("columns_mxfp4", "sm_120", r"sub\S*\.f32|fma\.rn\.f32"),
    ("columns_mxfp4", "gfx942", r"v_fma_f32|v_pk_fma_f32|v_fmac_f32"),
    ("fp8_fnuz", "gfx942", r"v_mfma_f32_\w+fp8_fp8"),
    ("fp8_fnuz_tails", "gfx942", r"v_mfma_f32_\w+fp8_fp8"),
    ("tq_row_fnuz", "gfx942", r"(?s)v_mfma_f32_\w+bf16.*v_cvt_pk_fp8_f32"),
    ("fp8_fn", "gfx950", r"v_mfma_f32_\w+fp8_fp8|v_mfma_scale_f32_\w+f8f6f4|v_mfma_f32_\w+f8f6f4"),
    ("epilogue_gelu_tanh", "gfx942", r"v_mfma_f32_\w+bf16"),
    ("epilogue_silu", "gfx942", r"v_mfma_f32_\w+bf16"),
    ("epilogue_gelu", "gfx950", r"v_mfma_f32_\w+bf16"),
    ("epilogue_gelu_tanh", "sm_80", r"mma\.sync\S*bf16"),
    ("epilogue_gelu", "sm_90", r"wgmma\.mma_async\S*bf16|mma\.sync\S*bf16"),
    ("epilogue_gelu_tanh", "sm_100", r"mma\.sync\S*bf16|tcgen05\.mma"),
    ("epilogue_relu", "sm_120", r"mma\.sync\S*bf16"),
    ("w6a16", "sm_80", r"mma\.sync\S*bf16"),
    ("w6a6", "sm_100", r"mma\.sync\S*bf16|tcgen05\.mma"),
    ("w6a6", "gfx950", r"v_mfma_f32_\w+bf16"),
    ("w6_fp8", "sm_90", r"mma\.sync\S*f16\.f16"),  # Triton widens e4m3 in registers, exactly, as W is decoded there
    ("w6_fnuz", "gfx942", r"v_mfma_f32_\w+fp8_fp8"),
    ("w6_unpack", "sm_90", r"cvt\.rn\.satfinite\.e4m3x2"),
    ("tq_row_fp6", "sm_90", r"(?s)mma\S*bf16.*cvt\.rn\.satfinite\.e4m3x2"),
    ("tq_pair", "sm_90", r"cvt\.rn\.satfinite\.e4m3x2"),
    ("tq_branch", "gfx942", r"v_mfma_f32_\w+bf16"),
    ("tq_branch", "sm_90", r"wgmma\.mma_async\S*bf16|mma\.sync\S*bf16"),
    ("tq_branch", "sm_100", r"mma\.sync\S*bf16|tcgen05\.mma"),
    ("tq_low_rank_mxfp4", "gfx942", r"v_mfma_f32_\w+bf16"),
    ("tq_low_rank_mxfp4", "gfx950", r"v_mfma_f32_\w+bf16"),
    ("tq_low_rank_mxfp4", "sm_90", r"wgmma\.mma_async\S*bf16|mma\.sync\S*bf16"),
    ("tq_low_rank_nvfp4", "sm_80", r"mma\.sync\S*bf16"),
    ("tq_low_rank_mxfp4", "sm_100", r"mma\.sync\S*bf16|tcgen05\.mma"),
    ("tq_low_rank_nvfp4", "sm_120", r"mma\.sync\S*bf16"),
    ("grouped_w4a16", "gfx942", r"v_mfma_f32_\w+bf16"),
    ("grouped_w4a16", "gfx950", r"v_mfma_f32_\w+bf16"),
    ("grouped_w4a16", "sm_80", r"mma\.sync\S*bf16"),
    ("grouped_w4a4", "sm_90", r"wgmma\.mma_async\S*bf16|mma\.sync\S*bf16"),
    ("grouped_w4a4", "sm_120", r"mma\.sync\S*bf16"),
    ("grouped_w4a4_native", "gfx950", r"v_mfma_scale_f32_\w+f8f6f4"),
    ("grouped_w4a4_native", "sm_100", r"tcgen05\.mma\S*kind::mxf4"),
    ("grouped_w4a4_native", "sm_120", r"mma\.sync\S*kind::mxf4"),
]


@pytest.mark.parametrize(("name", "target", "instruction"), MATRIX_INSTRUCTIONS, ids=lambda v: str(v)[:12])
def test_machine_code(name, target, instruction, tmp_path, monkeypatch):
    package = pytest.importorskip("triton", reason="install mxjax[test]: the triton package compiles for every GPU")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    backend, arch, warp, shared_limit = TARGETS[target][2:]
    source = tmp_path / "kernel.ttir"
    source.write_text(triton_ir(name, target))
    warps, stages = KERNELS[name][2:]
    options = {"num_warps": warps, "num_stages": stages}
    binary = package.compiler.compile(str(source), target=GPUTarget(backend, arch, warp), options=options)
    code = binary.asm["amdgcn"] if backend == "hip" else binary.asm["ptx"]
    found = sorted(set(re.findall(r"v_mfma\w+|wgmma\.mma\S+|mma\.sync\S+|tcgen05\.mma\S+", code)))
    assert re.search(instruction, code), f"{name} on {target} has no {instruction}, but {found}"
    assert binary.metadata.shared <= shared_limit
    assert spilled_bytes(code, backend, package, tmp_path) == 0


def spilled_bytes(code, backend, package, folder):
    """Registers that went to memory, as the compiler reports them (AMD's scalar ones go to vector registers)."""
    if backend == "hip":
        return sum(int(n) for n in re.findall(r"\.vgpr_spill_count:\s+(\d+)", code))
    ptxas = next((Path(package.__file__).parent / "backends/nvidia/bin").glob("ptxas*"))
    arch = re.search(r"\.target (\w+)", code).group(1)
    (folder / "kernel.ptx").write_text(code)
    command = [ptxas, f"-arch={arch}", "-v", folder / "kernel.ptx", "-o", folder / "kernel.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
