"""What is timed: operands of random bytes, and a job for each kernel, shape and number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mxjax import backend
from mxjax.core.formats import MXFP4, MXFP8_E4M3, NVFP4
from pallas_kernels import _compat, linear
from pallas_kernels.bench.timing import Job, copies
from pallas_kernels.block_scaled_matmul import PackedWeight, block_scaled_matmul, mosaic_unpack, prepare, triton
from pallas_kernels.grouped_matmul import expert_stack
from pallas_kernels.transform_quantize import Transform, arg_specs, transform_quantize, transform_quantize_fp8

BF16, F8, F32 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32
Shapes = Sequence[tuple[int, int]]


@partial(jax.jit, static_argnames=("shape", "low", "high"))
def random_bits(shape: tuple[int, ...], seed: Any, low: int = 0, high: int = 256) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, low, high, jnp.int32).astype(jnp.uint8)


@partial(jax.jit, static_argnames=("shape", "dtype"))
def normal(shape: tuple[int, ...], seed: Any, dtype: Any = BF16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@partial(jax.jit, static_argnames=("n", "k", "layout", "activation"))
def packed(n: int, k: int, seed: Any, layout: str | None = None, activation: Any = None) -> PackedWeight:
    """An MXFP4 weight of random codes, by default in this machine's layout; scales within 10 binades of one another.

    Random codes have variance of order 1: the tensor scale keeps products the size of their operands.
    """
    codes, scales = random_bits((n, k // 2), seed), random_bits((n, k // 32), seed + 1, 117, 128)
    return prepare(codes, scales, MXFP4, jnp.float32(k**-0.5), layout=layout, activation=activation)


def weight_bytes(n: int, k: int) -> int:
    return n * k * 17 // 32


def bf16_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """The faster of XLA's two ways to write it is not known ahead: this is the usual one."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=BF16)


def bf16_matmul_f32(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=F32).astype(BF16)


def _copy_kernel(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...]


def triton_copy(x: jax.Array) -> jax.Array:
    """A plain copy, 16 bytes a thread and load: the ceiling of what a kernel can move."""
    spec = _compat.pl.BlockSpec((8192,), lambda i: (i,))
    return _compat.triton_call(
        _copy_kernel, name="copy", grid=(x.size // 8192,), in_specs=[spec], out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), num_warps=4, num_stages=1,
    )(x)  # fmt: skip


def ceiling_jobs(triton_too: bool = True, fp8: bool = True, values: int = 2**28) -> list[Job]:
    """What memory and matrix units can do: the floors are made from these."""
    big = [(normal((values,), i),) for i in range(3)]
    jobs = [Job(("copy", "xla"), lambda x: x + jnp.bfloat16(1), big, {"bytes": 4 * values})]
    if triton_too:
        jobs.append(Job(("copy", "triton"), triton_copy, big, {"bytes": 4 * values}))
    if fp8:
        operands = [(normal((8192, 8192), 1).astype(F8), normal((8192, 8192), i).astype(F8)) for i in range(2, 5)]
        jobs.append(Job(("fp8 xla", 8192), bf16_matmul, operands, {"flops": 2 * 8192**3}))
    return jobs


def baseline_jobs(shapes: Shapes, ms: Sequence[int]) -> list[Job]:
    jobs = []
    for n, k in shapes:
        weights = [normal((n, k), i) for i in range(copies(2 * n * k))]
        for m in ms:
            x = normal((m, k), 99)
            for name, fn in (("bf16", bf16_matmul), ("bf16 f32", bf16_matmul_f32)):
                if name == "bf16 f32" and m > 128:
                    continue
                jobs.append(Job((name, n, k, m), fn, [(x, w) for w in weights]))
    return jobs


def _w4a4(x: jax.Array, w: PackedWeight) -> jax.Array:
    return linear.quantized_linear(x, w, activation=MXFP4, transform=Transform(hadamard=32))


def layer_jobs(name: str, shapes: Shapes, ms: Sequence[int]) -> list[Job]:
    """``name``: "w4a16", or "w4a4", with Hadamard 32 and the quantization of x included."""
    fn, seed = {"w4a16": (block_scaled_matmul, 98), "w4a4": (_w4a4, 97)}[name]
    jobs = []
    for n, k in shapes:
        activation = MXFP4 if name == "w4a4" else None
        weights = [packed(n, k, i, activation=activation) for i in range(copies(weight_bytes(n, k)))]
        for m in ms:
            x = normal((m, k), seed)
            info: dict[str, Any] = {"bytes": n * k * 17 / 32 + 2 * m * (n + k)}
            if name == "w4a4":
                info["flops"] = 2 * m * n * k
            jobs.append(Job((name, n, k, m), fn, [(x, w) for w in weights], info))
    return jobs


def quantize_jobs(ms: Sequence[int]) -> list[Job]:
    transforms = {
        "hadamard32": lambda k: Transform(hadamard=32),
        "kronecker": lambda k: Transform(matrix=normal((32, 32), 5, F32)),
        # KroQuant's: factors of their own for pairs of blocks, and for a dozen (as many as half a parameter a channel)
        "kronecker factors": lambda k: Transform(left=normal((k // 64, 4, 4), 5, F32), right=normal((8, 8, 8), 7, F32)),
        "scale": lambda k: Transform(channel_scale=normal((k,), 6)),
        "none": lambda k: Transform(),
    }
    jobs = []
    for k in arg_specs.BENCH_K:
        for m in ms:
            xs = [(normal((m, k), i),) for i in range(copies(3 * m * k))]
            for name, make in transforms.items():
                fn = partial(transform_quantize_fp8, transform=make(k))
                jobs.append(Job(("tq fp8", name, m, k), fn, xs, {"bytes": 3 * m * k}))
                if m == max(ms) and (k == 8192 or name == "hadamard32"):
                    fn = partial(transform_quantize, fmt=MXFP4, transform=make(k))
                    jobs.append(Job(("tq mxfp4", name, m, k), fn, xs, {"bytes": m * k * (2 + 17 / 32)}))
            if m == max(ms) and k == 8192:
                t = transforms["hadamard32"](k)
                fn = partial(transform_quantize, fmt=MXFP8_E4M3, transform=t)
                jobs.append(Job(("tq mxfp8", "hadamard32", m, k), fn, xs, {"bytes": m * k * (3 + 1 / 32)}))
                fn = partial(transform_quantize, fmt=NVFP4, transform=t, tensor_scale=jnp.full((m,), 0.01, F32))
                jobs.append(Job(("tq nvfp4", "hadamard32", m, k), fn, xs, {"bytes": m * k * (2 + 9 / 16)}))
    return jobs


def grouped_jobs(experts: int = 32, n: int = 5760, k: int = 2880, ms: Sequence[int] = (128, 1024, 4096)) -> list[Job]:
    """Experts of gpt-oss-20b's size with 4-bit weights against ``ragged_dot`` in bfloat16; sizes that differ."""
    parts = [int(v) for v in jax.random.randint(jax.random.key(3), (experts,), 0, 5, jnp.int32)]
    weights = [
        expert_stack(random_bits((experts, n, k // 2), i), random_bits((experts, n, k // 32), i + 9, 117, 128), MXFP4)
        for i in range(3)
    ]
    dense = [normal((experts, k, n), i) for i in range(3)]
    jobs = []
    for m in ms:
        sizes = jnp.asarray([p * m // sum(parts) for p in parts], jnp.int32)
        x = normal((m, k), 99)
        moved = {"bytes": experts * n * k * 17 / 32 + 2 * m * (n + k)}
        jobs.append(Job(("ragged bf16", n, k, m), _ragged, [(x, w, sizes) for w in dense]))
        jobs.append(Job(("grouped w4a16", n, k, m), linear.grouped_linear, [(x, w, sizes) for w in weights], moved))
        fn = partial(linear.grouped_linear, activation=MXFP4)
        jobs.append(Job(("grouped w4a4", n, k, m), fn, [(x, w, sizes) for w in weights], moved))
    return jobs


def _ragged(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, w, sizes, preferred_element_type=BF16)


def unpack_jobs() -> list[Job]:
    """Whole weights to values, in the layouts of this machine."""
    target = backend.target()
    jobs = []
    for n, k in ((8192, 8192), (14336, 4096)):
        for dtype, size, layout in ((F8, 1, "fp8_fragments"), (BF16, 2, "bf16_fragments")):
            if backend.has("wgmma", target):
                fn = partial(mosaic_unpack.unpack, cores=target.cores)
            else:
                fn, layout = partial(triton.unpack, dtype=dtype), "tiles"
            weights = [(packed(n, k, i, layout),) for i in range(6)]
            name = f"unpack {layout} {jnp.dtype(dtype).name}"
            jobs.append(Job((name, n, k), fn, weights, {"bytes": n * k * (17 / 32 + size)}))
    return jobs
