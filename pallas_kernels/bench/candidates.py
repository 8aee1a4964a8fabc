"""What ``mxjax tune`` tries: for each kernel and shape a bounded list of configurations, the most promising first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mxjax import backend
from mxjax.core.formats import MXFP4
from mxjax.errors import BackendUnsupported
from pallas_kernels import _dispatch, _tuning
from pallas_kernels._compat import pl
from pallas_kernels.bench.jobs import normal, packed
from pallas_kernels.block_scaled_matmul import (
    Epilogue,
    PackedWeight,
    default_layout,
    fused_tiles,
    mosaic_decode,
    mosaic_fused,
    triton,
    triton_generic,
)
from pallas_kernels.block_scaled_matmul.api import native_pair
from pallas_kernels.block_scaled_matmul.routes import FUSED_ROWS
from pallas_kernels.transform_quantize import transform_quantize

MOST_CONFIGS = 16  # of one problem


@dataclass(frozen=True)
class Problem:
    """A kernel, its sizes, and the configurations to try in this order; the heuristic's own is the first.

    Attributes:
      operation: the key of the tuning file.
      n, k, m: sizes; m is a bucket.
      configs: at most MOST_CONFIGS.
      run: ``run(config)`` is the function of ``(x, weight)`` to time.
      x: the first operand.
      layout: of the weight.
    """

    operation: str
    n: int
    k: int
    m: int
    configs: tuple[Any, ...]
    run: Callable[[Any], Callable[..., jax.Array]]
    x: Any
    layout: str


def problems(shapes: Sequence[tuple[int, int]], ms: Sequence[int], target: backend.Target) -> Iterator[Problem]:
    """What can be tuned on this machine for these shapes [N, K] and numbers of rows.

    Raises:
      BackendUnsupported: a machine on which XLA alone runs.
    """
    if (obstacle := _dispatch.triton_obstacle(target)) is not None:
        raise BackendUnsupported(f"there is nothing to tune: {obstacle}")
    layout = default_layout(MXFP4, target)
    for n, k in shapes:
        for m in _tuning.buckets(ms):
            if layout == "rows":
                yield from _generic_problems(n, k, m, target)
            elif layout != "tiles":
                yield from _fragment_problems(n, k, m, target)
            elif m <= 128:
                yield _decode_problem(n, k, m, target)


def _decode_problem(n: int, k: int, m: int, target: backend.Target) -> Problem:
    first = triton.decode_config(m, packed(n, k, 0, "tiles"), target.cores)
    tried = [
        triton.DecodeConfig(block_m, splits)
        for block_m in (16, 32, 64, 128)
        if m <= block_m < max(4 * m, 17) or (block_m == 64 and m > 64)
        for splits in (1, 2, 4, 8)
        if splits <= max(k // 512, 1)
    ]

    def run(config: triton.DecodeConfig) -> Callable[..., jax.Array]:
        return lambda x, w: triton.decode(x, None, w, None, jnp.bfloat16, config)

    return Problem("w4_decode", n, k, m, _first(first, tried), run, normal((m, k), 98), "tiles")


def _fragment_problems(n: int, k: int, m: int, target: backend.Target) -> Iterator[Problem]:
    """Hopper: W4A16 and W4A4 in fragments."""
    x = normal((m, k), 98)
    tried: tuple[Any, ...]
    if m <= mosaic_decode.MAX_ROWS:
        for rows in (8, 16):
            tried = _rows_configs(rows, n, k, target.cores)
            yield Problem(mosaic_decode.operation(rows), n, k, m, tried, _run_rows, x[:rows], "bf16_fragments")
    for fp8 in (False, True) if m > mosaic_decode.MAX_ROWS else (True,):
        if m <= FUSED_ROWS:
            name = "fp8" if fp8 else "bf16"
            tried = _fused_configs(m, n, k, fp8, target.cores)
            operand = x.astype(jnp.float8_e4m3fn) if fp8 else x
            yield Problem(f"w4_fused_{name}", n, k, m, tried, _run_fused, operand, f"{name}_fragments")


def _run_rows(config: mosaic_decode.RowsConfig) -> Callable[..., jax.Array]:
    return lambda x, w: mosaic_decode.rows_matmul(x, w, None, jnp.bfloat16, config)


def _run_fused(config: fused_tiles.FusedConfig) -> Callable[..., jax.Array]:
    return lambda x, w: mosaic_fused.fused_matmul(x, None, w, Epilogue(), jnp.bfloat16, config)


def _rows_configs(m: int, n: int, k: int, cores: int) -> tuple[mosaic_decode.RowsConfig, ...]:
    """Twelve warps leave 168 registers a thread, which seven row tiles need; eight warps fit a multiprocessor twice.

    Ordered by the row tiles that the busiest multiprocessor gets; among those every size comes before the next depth.
    """
    first = mosaic_decode.rows_config(m, n, k, cores)
    r, tiles = first.row_tiles, pl.cdiv(n, 16)

    def busiest(size: tuple[int, int]) -> int:
        rows, warps = size
        resident = 2 if warps == 8 else 1
        return pl.cdiv(pl.cdiv(tiles, rows), resident * cores) * resident * rows

    sizes = sorted([(r, 16), (r, 12), (max(r // 2, 1), 8), (pl.cdiv(r, 2), 8), (r, 8)], key=busiest)
    return _first(first, [mosaic_decode.RowsConfig(*size, depth) for depth in (3, 1, 4, 2) for size in sizes])


def _fused_configs(m: int, n: int, k: int, fp8: bool, cores: int) -> tuple[fused_tiles.FusedConfig, ...]:
    """Around the heuristic's: how x arrives, splits of K, warpgroups, blocks in flight, and rows that divide evenly.

    Ordered by predicted time.
    """
    first = fused_tiles.fused_config(m, n, k, fp8, cores)
    bases = [first] if fp8 else [dataclasses.replace(first, gather=g) for g in (1, 2)]
    even = [-(-m // parts // 8) * 8 for parts in range(1, 9)]
    changes: list[dict[str, int]] = [{}]
    changes += [dict(splits=s) for s in (max(first.splits // 2, 1), first.splits + 1, 2 * first.splits)]
    changes += [dict(overlap=o) for o in (1, 2, 4)]
    changes += [dict(row_groups=g, overlap=1 if g == 4 else first.overlap) for g in (1, 2, 3, 4)]
    changes += [dict(block_m=b, overlap=1 if b > 128 else first.overlap) for b in even if 24 <= b <= 256]
    changes += [dict(row_groups=g, splits=max(first.splits // 2, 1)) for g in (1, 2)]
    tried = [dataclasses.replace(base, **change) for base in bases for change in changes]
    able = [c for c in tried if c.splits <= max(k // 512, 1)]
    return _first(first, sorted(able, key=lambda c: fused_tiles.predicted_time(m, n, k, fp8, cores, c)))


def _generic_problems(n: int, k: int, m: int, target: backend.Target) -> Iterator[Problem]:
    """W4A16 for few rows, and W4A4 where the matrix units take FP4."""
    native = native_pair(MXFP4, MXFP4, target)
    x = normal((m, k), 98)
    yield from _generic_problem(n, k, m, x, False) if m <= 64 else ()
    if native:
        yield from _generic_problem(n, k, m, transform_quantize(x, MXFP4), True)


def _generic_problem(n: int, k: int, m: int, x: Any, native: bool) -> Iterator[Problem]:
    make = triton_generic.GenericConfig
    rows = [b for b in (16, 32, 64, 128) if b <= max(m, 16)][-2:]
    tried = [
        make(block_m, block_n, block_k, warps, 2)
        for block_m in rows
        for block_n in (64, 128)
        for block_k in ((128, 256) if native else (64, 128))
        for warps in (4, 8)
    ]

    def run(config: triton_generic.GenericConfig) -> Callable[..., jax.Array]:
        def of(x: Any, w: PackedWeight) -> jax.Array:
            codes, scales = x if native else (x, None)
            fmt = MXFP4 if native else None
            return triton_generic.generic(codes, scales, None, w, Epilogue(), fmt, jnp.bfloat16, config, native=native)

        return of

    operation = "matmul_mxfp4_mxfp4_native" if native else "matmul_bfloat16_mxfp4"
    configs = _first(triton_generic.generic_config(m, n, native), tried)
    yield Problem(operation, n, k, m, configs, run, x, "rows")


def _first(heuristic: Any, tried: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys([heuristic, *tried]))[:MOST_CONFIGS]
