"""Products of block-scaled operands in Pallas Triton, any rows, formats and GPU; weights in "rows".

Three modes: operands are decoded to bfloat16 in registers (float32 where x is wider than bfloat16); or they go to the
matrix units as they are ("native": ``tt.dot_scaled``), where the chip has block-scaled instructions; or both are e4m3
("fp8": x as the exact-FP8 pair, W decoded relative to its row's largest scale), for chips with FP8 units only.

``generic`` multiplies by one weight. ``grouped`` multiplies rows that are sorted by expert by a stack of weights: the
same kernel, whose row tiles come from a table (:mod:`pallas_kernels.grouped_matmul.tiles`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.core.formats import BlockFormat
from pallas_kernels import _compat
from pallas_kernels._compat import pl
from pallas_kernels.block_scaled_matmul.decode import OFFSET, decode_fp8, decode_rows, offset_of, row_top
from pallas_kernels.block_scaled_matmul.epilogue import FUNCTIONS, Epilogue
from pallas_kernels.block_scaled_matmul.layout import PackedWeight
from pallas_kernels.transform_quantize.low_rank import padded_rank
from pallas_kernels.transform_quantize.reference import fp8_top

FP8_DTYPES = (jnp.float8_e4m3fn, jnp.float8_e4m3fnuz)


@dataclass(frozen=True)
class GenericConfig:
    """Tile sizes of the generic kernel and the compiler's parameters."""

    block_m: int = 64
    block_n: int = 64
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 2


def generic_config(m: int, n: int, native: bool) -> GenericConfig:
    """Small tiles for few rows; the tile of the native FP4 instructions for many."""
    if m <= 16:
        return GenericConfig(block_m=16)
    if m <= 64:
        return GenericConfig()
    if native:
        return GenericConfig(block_m=128, block_n=128, block_k=256, num_warps=8)
    return GenericConfig(block_m=128, block_n=128)


def _triton_type(fmt: BlockFormat | None) -> str:
    return "BF16" if fmt is None else fmt.element.name.upper()


def _dot_scaled_reference(
    a: Any, a_scale: Any, b: Any, b_scale: Any, acc: Any, *, x_fmt: BlockFormat | None, w_fmt: BlockFormat
) -> jax.Array:
    x = a.astype(jnp.float32)
    if x_fmt is not None:
        x = decode_rows(a, a_scale, x_fmt).astype(jnp.float32) * 2.0**OFFSET
    w = decode_rows(b.T, b_scale, w_fmt).astype(jnp.float32) * 2.0**OFFSET
    return acc + jnp.dot(x, w.T, precision=lax.Precision.HIGHEST)


@dataclass(frozen=True)
class _Problem:
    """What a kernel is compiled for.

    Attributes:
      m, n, k: rows of x, rows and columns of one weight.
      stride: rows from one expert's weight to the next in the arrays, 0 for one weight.
      x_fmt, w_fmt: formats; x_fmt None for x as it is.
      mode: "decode", "native" or "fp8".
      function: activation function of the epilogue.
      names: the operands, in the order of the kernel's arguments.
    """

    m: int
    n: int
    k: int
    stride: int
    x_fmt: BlockFormat | None
    w_fmt: BlockFormat
    mode: str
    function: str | None
    names: tuple[str, ...]


def _kernel(*refs: Any, p: _Problem, c: GenericConfig) -> None:
    """One tile of the result."""
    ref, o_ref = dict(zip(p.names, refs[:-1], strict=True)), refs[-1]
    col0 = pl.program_id(0) * c.block_n
    steps: Any = pl.cdiv(p.k, c.block_k)
    if "expert" in ref:  # a row tile of one expert; rows of none get zero
        t = pl.program_id(1)
        expert, row0, stop = (ref[name][t] for name in ("expert", "start", "stop"))
        used = expert >= 0
        base = jnp.maximum(expert, 0) * p.stride
        # not jnp.where: Pallas would lower a choice between two constants as one between two i1
        steps = (used & (row0 < stop)).astype(jnp.int32) * steps
    else:
        row0, stop, base, used = pl.program_id(1) * c.block_m, p.m, 0, None  # type: ignore[assignment]
    whole_rows = used is None and p.m % c.block_m == 0

    def tile(name: str, rows: Any, i: jax.Array, columns: int, width: int, step: tuple[int, int] = (1, 0)) -> jax.Array:
        """[rows, columns] from column i * columns on, zero outside. ``rows``: (offset, first, count, limit, whole).
        ``step``: column j stands at step[0] * j + step[1] of the array."""
        offset, first, count, limit, whole = rows
        row = first + lax.broadcasted_iota(jnp.int32, (count, columns), 0)
        column = i * columns + lax.broadcasted_iota(jnp.int32, (count, columns), 1)
        whole = whole and width % columns == 0
        mask = None if whole else (row < limit) & (column < width)
        return _compat.load(ref[name].at[offset + row, column * step[0] + step[1]], mask, 0)

    x_rows = (0, row0, c.block_m, stop, whole_rows)
    w_rows = (base, col0, c.block_n, p.n, p.n % c.block_n == 0)

    def operand(name: str, rows: Any, fmt: BlockFormat, i: jax.Array) -> tuple[Any, jax.Array]:
        codes: Any
        if fmt.element.bits == 6:
            codes = tuple(tile(name, rows, i, c.block_k // 4, p.k // 4, (3, byte)) for byte in range(3))
        else:
            codes = tile(name, rows, i, fmt.packed_size(c.block_k), fmt.packed_size(p.k))
        return codes, tile(name + "_scales", rows, i, c.block_k // fmt.block_size, p.k // fmt.block_size)

    row = row0 + lax.broadcasted_iota(jnp.int32, (c.block_m,), 0)
    column = col0 + lax.broadcasted_iota(jnp.int32, (c.block_n,), 0)

    def by_column(name: str, other: Any = 0.0) -> jax.Array:
        return _compat.load(ref[name].at[base + column], column < p.n, other)

    top = by_column("w_top", 0) if p.mode == "fp8" else None

    def step(i: jax.Array, acc: jax.Array) -> jax.Array:
        w, ws = operand("w", w_rows, p.w_fmt, i)
        if p.x_fmt is None:
            x, xs = tile("x", x_rows, i, c.block_k, p.k), None
        else:
            x, xs = operand("x", x_rows, p.x_fmt, i)
        if p.mode == "native":
            reference = partial(_dot_scaled_reference, x_fmt=p.x_fmt, w_fmt=p.w_fmt)
            return _compat.dot_scaled(
                _as_element(x, p.x_fmt), xs, _triton_type(p.x_fmt),
                _as_element(w, p.w_fmt).T, ws, _triton_type(p.w_fmt), acc, reference=reference,
            )  # fmt: skip
        if top is not None:
            w = decode_fp8(w, ws, top, x.dtype, p.w_fmt)
            return acc + jnp.dot(x, w.T, preferred_element_type=jnp.float32)
        wide = x.dtype if p.x_fmt is None and x.dtype in (jnp.float32, jnp.float16) else jnp.bfloat16
        wide = jnp.float32 if wide == jnp.float16 else wide  # float16 cannot hold every weight
        x = x.astype(wide) if p.x_fmt is None else decode_rows(x, xs, p.x_fmt).astype(wide)
        w = decode_rows(w, ws, p.w_fmt).astype(wide)
        return acc + jnp.dot(x, w.T, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    acc = lax.fori_loop(0, steps, step, jnp.zeros((c.block_m, c.block_n), jnp.float32))
    if p.mode == "decode":
        acc = acc * 2.0 ** (offset_of(p.x_fmt) + offset_of(p.w_fmt))
    factors = []  # their product is small enough, and large enough, where one of them alone is not: reference.finish
    if top is not None:  # 2**(top - 127 - fp8_top) by exponent bits
        binade = top - fp8_top(ref["x"].dtype, p.w_fmt.element)
        factors.append(lax.bitcast_convert_type(binade << 23, jnp.float32)[None, :])
    if "row_scale" in ref:
        factors.append(by_column("row_scale")[None, :])
    if "x_scale" in ref:
        factors.append(_compat.load(ref["x_scale"].at[row], row < stop, 0.0)[:, None])
    if factors:
        acc = acc * math.prod(factors[1:], start=factors[0])
    if "down" in ref:
        rank = ref["down"].shape[1]
        down = tile("down", x_rows, jnp.int32(0), rank, rank)
        up = tile("up", w_rows, jnp.int32(0), rank, rank)
        acc = acc + jnp.dot(down, up.T, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    if "bias" in ref:
        acc = acc + by_column("bias")[None, :]
    if p.function is not None:
        acc = FUNCTIONS[p.function](acc)
    if used is not None:
        acc = jnp.where(used, acc, 0.0)
    rows = row0 + lax.broadcasted_iota(jnp.int32, acc.shape, 0)
    columns = col0 + lax.broadcasted_iota(jnp.int32, acc.shape, 1)
    _compat.store(o_ref.at[rows, columns], acc.astype(o_ref.dtype), (rows < stop) & (columns < p.n))


def _as_element(codes: jax.Array, fmt: BlockFormat | None) -> jax.Array:
    """What ``tt.dot_scaled`` takes: nibbles as bytes, 8-bit codes as their float8."""
    if fmt is None or fmt.element.bits == 4:
        return codes
    return lax.bitcast_convert_type(codes, jnp.dtype(fmt.element.dtype))


def _run(
    operands: dict[str, jax.Array | None], p: dict[str, Any], config: GenericConfig, row_tiles: int, out_dtype: Any,
    name: str, interpret: bool,
) -> jax.Array:  # fmt: skip
    present = {key: value for key, value in operands.items() if value is not None}
    problem = _Problem(**p, names=tuple(present))
    suffix = "" if problem.mode == "decode" else "_" + problem.mode
    return _compat.triton_call(
        partial(_kernel, p=problem, c=config),
        name=f"{name}_{problem.x_fmt or present['x'].dtype}_{problem.w_fmt}{suffix}",
        grid=(pl.cdiv(problem.n, config.block_n), row_tiles),
        in_specs=[pl.BlockSpec(a.shape, lambda j, i, r=a.ndim: (0,) * r) for a in present.values()],
        out_specs=pl.BlockSpec((problem.m, problem.n), lambda j, i: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((problem.m, problem.n), out_dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(*present.values())


def _mode(x: jax.Array, native: bool) -> str:
    return "native" if native else "fp8" if x.dtype in FP8_DTYPES else "decode"


def _float32(a: jax.Array | None) -> jax.Array | None:
    return None if a is None else a.astype(jnp.float32)


@partial(jax.jit, static_argnames=("x_fmt", "out_dtype", "config", "native", "interpret"))
def generic(
    x: jax.Array,
    x_scales: jax.Array | None,
    x_scale: jax.Array | None,
    w: PackedWeight,
    epilogue: Epilogue,
    x_fmt: BlockFormat | None,
    out_dtype: Any,
    config: GenericConfig,
    *,
    native: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """:func:`pallas_kernels.block_scaled_matmul.reference.matmul` for a "rows" weight."""
    assert w.scales is not None  # "rows"
    mode = _mode(x, native)
    down, up = epilogue.down, epilogue.up
    if down is not None and up is not None:
        down, up = padded_rank(down), padded_rank(up.astype(down.dtype))
    operands = {
        "x": x, "x_scales": x_scales, "w": w.codes, "w_scales": w.scales,
        "w_top": row_top(w.scales[: w.n, : w.k // w.format.block_size]) if mode == "fp8" else None,
        "x_scale": x_scale, "row_scale": w.row_scale, "bias": _float32(epilogue.bias), "down": down, "up": up,
    }  # fmt: skip
    problem = dict(m=x.shape[0], n=w.n, k=w.k, stride=0, x_fmt=x_fmt, w_fmt=w.format, mode=mode)
    problem |= dict(function=epilogue.function)
    tiles = pl.cdiv(x.shape[0], config.block_m)
    return _run(operands, problem, config, tiles, out_dtype, "matmul", interpret)


@partial(jax.jit, static_argnames=("x_fmt", "out_dtype", "config", "native", "interpret"))
def grouped(
    x: jax.Array,
    x_scales: jax.Array | None,
    x_scale: jax.Array | None,
    w: PackedWeight,
    table: tuple[jax.Array, jax.Array, jax.Array],
    bias: jax.Array | None,
    x_fmt: BlockFormat | None,
    out_dtype: Any,
    config: GenericConfig,
    *,
    native: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """:func:`pallas_kernels.grouped_matmul.reference.matmul`: ``w`` is a stack [E, N, K] of "rows" weights.

    Args:
      table: expert, first row and end of every row tile, of ``config.block_m`` rows at most
        (:func:`pallas_kernels.grouped_matmul.tiles.row_tiles`).
      bias: [E, N] or None.
    """
    assert w.scales is not None  # "rows"
    experts, stride = w.codes.shape[:2]
    flat = dict(w=w.codes, w_scales=w.scales, row_scale=w.row_scale, bias=_float32(bias))
    flat = {k: None if a is None else a.reshape(experts * stride, *a.shape[2:]) for k, a in flat.items()}
    mode = _mode(x, native)
    operands = {
        "x": x, "x_scales": x_scales, "x_scale": x_scale, **flat,
        "w_top": row_top(w.scales).reshape(-1) if mode == "fp8" else None,
        **dict(zip(("expert", "start", "stop"), table, strict=True)),
    }  # fmt: skip
    problem = dict(m=x.shape[0], n=w.n, k=w.k, stride=stride, x_fmt=x_fmt, w_fmt=w.format, mode=mode, function=None)
    return _run(operands, problem, config, table[0].shape[0], out_dtype, "grouped_matmul", interpret)
