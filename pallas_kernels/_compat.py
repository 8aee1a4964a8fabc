"""The only file that imports Pallas, ``jax._src`` or ``jaxlib.triton``: what moves between JAX versions is met here.

Covers jax 0.10.2 to 0.12. Four things are ours:

* :func:`triton_call` and :func:`mosaic_call` always pass explicit compiler parameters, because the default backend of
  ``pallas_call`` on a GPU changed twice (Mosaic GPU, then Triton).
* :func:`inline_asm`, PTX with several results (Pallas' own version fails to lower with more than one).
* :func:`dot_scaled`, the MLIR operation ``tt.dot_scaled``, which Pallas does not expose: block-scaled FP4 and FP8
  products, native where the chip has them and decoded to bfloat16 by the compiler elsewhere.
* :func:`to_e4m3fnuz`, a cast that Pallas refuses.

The first two primitives take a ``reference`` in plain JAX, which is what runs in interpret mode.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir

# Pallas' Triton backend still is the only one for AMD; a user of mxjax can do nothing about the deprecation.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")

try:
    from jax._src.pallas.triton import lowering as _lowering
    from jax.experimental.pallas import triton as _triton
    from jaxlib.triton import dialect as _dialect
except ImportError as e:  # removed from this JAX
    _lowering = _triton = _dialect = None  # type: ignore[assignment]
    TRITON_MISSING: str | None = f"this jax ({jax.__version__}) has no Pallas Triton backend: {e}"
else:
    TRITON_MISSING = None

# Since 0.11, Mosaic's functions take indexed and transposed refs; before, the index came beside the ref.
_MOSAIC_INDEXES_REFS = jax.__version_info__ >= (0, 11)

__all__ = [
    "TRITON_MISSING",
    "block_scaled_mma_missing",
    "capture_triton_ir",
    "dot_scaled",
    "inline_asm",
    "load",
    "mosaic",
    "mosaic_ir",
    "pl",
    "store",
    "to_e4m3fnuz",
    "triton_call",
]


def triton_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    in_specs: Sequence[Any],
    out_specs: Any,
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool = False,
) -> Callable[..., Any]:
    """``pl.pallas_call`` on the Triton backend."""
    assert _triton is not None, TRITON_MISSING
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        name=name,
        interpret=interpret,
        compiler_params=_triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )


def load(ref: Any, mask: jax.Array | None = None, other: Any = None) -> jax.Array:
    """Masked load of a ref or of ``ref.at[...]``."""
    if mask is None:
        return ref[...]
    if ref.dtype == jnp.float8_e4m3fnuz:  # Pallas casts nothing to it, but takes an ``other`` that has the type
        zeros = jnp.zeros(mask.shape, jnp.uint8)  # the byte 0 is 0.0
        assert other == 0
        return _triton.load(ref, mask=mask, other=jax.lax.bitcast_convert_type(zeros, ref.dtype))
    if jnp.issubdtype(ref.dtype, jnp.floating):
        other = float(other)  # Triton casts float32 to float8, but no integer
    return _triton.load(ref, mask=mask, other=other)


def store(ref: Any, value: jax.Array, mask: jax.Array | None = None) -> None:
    """Masked store to a ref or to ``ref.at[...]``."""
    if mask is None:
        ref[...] = value
    else:
        _triton.store(ref, value, mask=mask)


def mosaic() -> Any:
    """The module ``jax.experimental.pallas.mosaic_gpu``; imported late, it is slow to load."""
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


@functools.cache
def mosaic_ir() -> SimpleNamespace:
    """The MLIR dialects and Mosaic's own helpers that hand-written register code is built from (mosaic_asm.py)."""
    names = {name: f"jaxlib.mlir.dialects.{name}" for name in ("arith", "llvm", "scf", "vector")}
    names |= {
        "ir": "jaxlib.mlir.ir",
        "mgpu": "jax.experimental.mosaic.gpu",
        "utils": "jax.experimental.mosaic.gpu.utils",
    }
    return SimpleNamespace(**{name: importlib.import_module(module) for name, module in names.items()})


def mosaic_load(ref: Any, start: Any, size: int, layout: Any) -> jax.Array:
    """``ref[start : start + size]`` from global memory to registers of a Mosaic layout."""
    return mosaic_load_at(ref, (pl.ds(start, size),), layout)


def mosaic_load_at(ref: Any, index: tuple, layout: Any) -> jax.Array:
    """``ref[index]``, slices with static sizes, from global memory to registers of a Mosaic layout."""
    plgpu = mosaic()
    if not _MOSAIC_INDEXES_REFS:
        return plgpu.load(ref, index, layout=layout, optimized=False)
    return plgpu.load(ref.at[index], layout=layout, optimized=False)


def mosaic_transpose(ref: Any) -> Any:
    """A transposed view of a two-dimensional ref."""
    return ref.transpose((1, 0)) if _MOSAIC_INDEXES_REFS else mosaic().transpose_ref(ref, (1, 0))


def block_scaled_mma_missing() -> str | None:
    """What this JAX lacks of Mosaic GPU's block-scaled ``tcgen05.mma``, or None."""
    plgpu = mosaic()
    needed = ("tcgen05_mma", "async_copy_scales_to_tmem", "async_load_tmem", "warp_map", "TMEMLayout")
    missing = [name for name in needed if not hasattr(plgpu, name)]
    if not missing and "a_scale" not in inspect.signature(plgpu.tcgen05_mma).parameters:
        missing = ["tcgen05_mma(a_scale=)"]
    if not missing:
        return None
    return f"Pallas Mosaic GPU of this jax ({jax.__version__}) has no {', '.join(missing)}"


# --- inline PTX ------------------------------------------------------------------------------------------------------

_asm_p = Primitive("mxjax_inline_asm")
_asm_p.multiple_results = True


def inline_asm(
    asm: str,
    *args: jax.Array,
    constraints: str,
    pack: int,
    out_dtypes: Sequence[Any],
    reference: Callable[..., tuple[jax.Array, ...]],
) -> list[jax.Array]:
    """Elementwise PTX on ``pack`` consecutive register elements at a time.

    ``pack`` counts the elements a *thread* holds, which are neighbours in memory only in layouts that give each thread
    at least ``pack`` of them: check every configuration that uses ``pack > 1`` against the reference on a device.

    Args:
      asm, constraints: as in Triton's ``inline_asm_elementwise``.
      args: arrays of one shape.
      pack: elements a call of the assembly takes.
      out_dtypes: dtypes of the results, each of the shape of ``args[0]``.
      reference: the same function of ``args`` in JAX.
    """
    dtypes = tuple(jnp.dtype(d) for d in out_dtypes)
    return _asm_p.bind(*args, asm=asm, constraints=constraints, pack=pack, out_dtypes=dtypes, reference=reference)


@_asm_p.def_abstract_eval
def _asm_abstract(*args: Any, out_dtypes: tuple, **_: Any) -> list[Any]:
    return [jax.core.ShapedArray(args[0].shape, d) for d in out_dtypes]


def _asm_reference(*args: Any, reference: Callable, **_: Any) -> tuple:
    return reference(*args)


_asm_p.def_impl(_asm_reference)
mlir.register_lowering(_asm_p, mlir.lower_fun(_asm_reference, multiple_results=True))

# --- e4m3fnuz --------------------------------------------------------------------------------------------------------

_to_fnuz_p = Primitive("mxjax_to_e4m3fnuz")


def to_e4m3fnuz(x: jax.Array) -> jax.Array:
    """float32 to float8_e4m3fnuz, to the nearest, ties to even; what rounds to zero is +0 (0x80 is NaN there).

    Pallas Triton refuses this cast, since NVIDIA has no such format; the compiler for AMD knows it.
    """
    half_a_step = 2.0**-11  # half of the smallest number; the tie goes to zero
    return _to_fnuz_p.bind(jnp.where(jnp.abs(x) <= half_a_step, 0.0, x))


@_to_fnuz_p.def_abstract_eval
def _to_fnuz_abstract(x: Any) -> Any:
    return jax.core.ShapedArray(x.shape, jnp.dtype(jnp.float8_e4m3fnuz))


def _to_fnuz_reference(x: Any) -> Any:
    return x.astype(jnp.float8_e4m3fnuz)


_to_fnuz_p.def_impl(_to_fnuz_reference)
mlir.register_lowering(_to_fnuz_p, mlir.lower_fun(_to_fnuz_reference, multiple_results=False))

# --- block-scaled dot ------------------------------------------------------------------------------------------------

_dot_scaled_p = Primitive("mxjax_dot_scaled")


def dot_scaled(
    a: jax.Array,
    a_scale: jax.Array | None,
    a_type: str,
    b: jax.Array,
    b_scale: jax.Array | None,
    b_type: str,
    acc: jax.Array,
    *,
    reference: Callable[..., jax.Array],
) -> jax.Array:
    """``acc + (a * a_scale) @ (b * b_scale)`` by ``tt.dot_scaled``.

    Args:
      a: [M, K] bfloat16 or float8, or uint8 [M, K/2] for a_type "E2M1" (low nibble first).
      a_scale: uint8 E8M0 [M, K/32], or None.
      a_type: "E2M1", "E4M3", "E5M2" or "BF16".
      b: [K, N], or uint8 [K/2, N] for "E2M1".
      b_scale: uint8 E8M0 [N, K/32] (as Triton has it), or None.
      b_type: as ``a_type``.
      acc: float32 [M, N].
      reference: the same function of ``(a, a_scale, b, b_scale, acc)`` in JAX; absent scales are left out.
    """
    present = (True, a_scale is not None, True, b_scale is not None, True)
    args = [x for x in (a, a_scale, b, b_scale, acc) if x is not None]
    return _dot_scaled_p.bind(*args, present=present, a_type=a_type, b_type=b_type, reference=reference)


def _place(args: Sequence[Any], present: Sequence[bool]) -> list[Any]:
    rest = iter(args)
    return [next(rest) if p else None for p in present]


@_dot_scaled_p.def_abstract_eval
def _dot_scaled_abstract(*args: Any, **_: Any) -> Any:
    return jax.core.ShapedArray(args[-1].shape, args[-1].dtype)


def _dot_scaled_reference(*args: Any, present: tuple, reference: Callable, **_: Any) -> Any:
    return reference(*_place(args, present))


_dot_scaled_p.def_impl(_dot_scaled_reference)
mlir.register_lowering(_dot_scaled_p, mlir.lower_fun(_dot_scaled_reference, multiple_results=False))

if _lowering is not None:

    @_lowering.register_lowering(_asm_p)
    def _asm_triton(ctx: Any, *args: Any, asm: str, constraints: str, pack: int, **_: Any) -> list[Any]:
        # Triton's integers are signless; `_dtype_to_ir_type` knows, JAX's own aval_to_ir_type does not.
        types = [
            _lowering.ir.RankedTensorType.get(aval.shape, _lowering._dtype_to_ir_type(aval.dtype))
            for aval in ctx.avals_out
        ]
        out: Any = _dialect.elementwise_inline_asm(
            types, asm, constraints=constraints, pure=True, packed_element=pack, args=args
        )
        return list(out) if len(types) > 1 else [out]

    @_lowering.register_lowering(_to_fnuz_p)
    def _to_fnuz_triton(ctx: Any, x: Any) -> Any:
        element = _lowering._dtype_to_ir_type(jnp.dtype(jnp.float8_e4m3fnuz))
        return _lowering._float_float_cast(x, _lowering.ir.RankedTensorType.get(ctx.avals_out[0].shape, element))

    @_lowering.register_lowering(_dot_scaled_p)
    def _dot_scaled_triton(ctx: Any, *args: Any, present: tuple, a_type: str, b_type: str, **_: Any) -> Any:
        a, a_scale, b, b_scale, acc = _place(args, present)
        kind = _dialect.ScaleDotElemType
        return _dialect.DotScaledOp(
            acc.type, a, b, acc, getattr(kind, a_type), getattr(kind, b_type), False,
            a_scale=a_scale, b_scale=b_scale, lhs_k_pack=True, rhs_k_pack=True,
        ).result  # fmt: skip


@contextlib.contextmanager
def capture_triton_ir() -> Iterator[list[str]]:
    """Collects the Triton IR of every kernel that is lowered inside the block, as text (for tests and inspection)."""
    assert _lowering is not None, TRITON_MISSING
    captured: list[str] = []
    original = _lowering.lower_jaxpr_to_triton_module

    def capture(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        captured.append(str(result.module.operation.get_asm(enable_debug_info=False)))
        return result

    _lowering.lower_jaxpr_to_triton_module = capture
    try:
        yield captured
    finally:
        _lowering.lower_jaxpr_to_triton_module = original


def kernel_times(run: Callable[[], None]) -> list[tuple[str, float]]:
    """(name, microseconds) of every GPU kernel that ``run`` launches, in order, from CUPTI: no launch gaps."""
    extension = importlib.import_module("jax.experimental.mosaic.gpu.profiler").mosaic_gpu_lib._mosaic_gpu_ext
    extension._cupti_init()
    try:
        run()
    finally:
        times = extension._cupti_get_timings(True)
    return [(name, 1e3 * ms) for name, ms in times]
