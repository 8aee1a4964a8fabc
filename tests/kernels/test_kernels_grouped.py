"""grouped_matmul: the table of tiles, the XLA loop and the kernel, against float64 on the true operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import IMPLEMENTATIONS, assert_product, weight

from mxjax.core.formats import get_format
from mxjax.core.quantize import quantize_array
from mxjax.errors import BackendUnsupported, BlockShapeError
from pallas_kernels.block_scaled_matmul import triton_generic
from pallas_kernels.grouped_matmul import api, expert_stack, grouped_matmul, reference
from pallas_kernels.grouped_matmul.tiles import row_tiles

RNG = np.random.default_rng(4)


def f64(x):
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 0, 0, 0], [9, 0, 0, 0], [0, 0, 0, 9], [4, 4, 0, 0], [20, 1, 0, 0]])
@pytest.mark.parametrize("block", [1, 2, 4, 16])
def test_tiles_cover_every_row_once_with_its_expert(sizes, block):
    rows = 9
    table = np.asarray(jax.jit(row_tiles, static_argnums=(1, 2))(jnp.asarray(sizes), rows, block))
    seen = np.full(rows, -7)
    for expert, start, stop in table.T:
        assert 0 <= stop - start <= block and (seen[start:stop] == -7).all()
        seen[start:stop] = expert
    np.testing.assert_array_equal(seen, np.repeat([0, 1, 2, 3, -1], [*sizes, rows])[:rows])


CASES = [  # x format, weight format, experts, n, k, group sizes, rows
    (None, "mxfp4", 3, 130, 96, [5, 0, 9], 16),  # two rows of no expert
    (None, "nvfp4", 2, 64, 160, [0, 3], 3),
    ("mxfp4", "mxfp4", 4, 33, 64, [0, 17, 0, 16], 33),
    ("mxfp8_e4m3", "mxfp4", 2, 16, 96, [1, 0], 1),
    ("nvfp4", "nvfp4", 2, 64, 64, [2, 2], 4),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
@pytest.mark.parametrize("interpret", [pytest.param(None, id="xla"), *IMPLEMENTATIONS])
def test_grouped(case, interpret):
    x_fmt, w_fmt, experts, n, k, sizes, m = case
    parts = [weight(n, k, w_fmt, seed=e) for e in range(experts)]
    factor = np.arange(1, experts + 1, dtype=np.float32) / 4 if w_fmt == "nvfp4" else None
    w = expert_stack(jnp.stack([p.codes for p in parts]), jnp.stack([p.scales for p in parts]), w_fmt, factor)
    x = jnp.asarray(RNG.standard_normal((m, k)), jnp.bfloat16)
    x_scales, x_scale, wanted, fmt = None, None, f64(x), None
    if x_fmt is not None:
        fmt, q = get_format(x_fmt), quantize_array(x, x_fmt)
        x, x_scales, wanted = q.codes, q.scales, f64(q.dequantize(jnp.float32))
        x_scale = None if q.global_scale is None else jnp.full((m,), q.global_scale)
    bias = jnp.asarray(RNG.standard_normal((experts, n)), jnp.float32)
    args, sizes = (x, x_scales, x_scale, w, jnp.asarray(sizes), bias, fmt, jnp.float32), np.asarray(sizes)
    for native in {False, x_fmt in ("mxfp4", "mxfp8_e4m3") and interpret is not None}:
        got = reference.matmul(*args) if interpret is None else api._triton(*args, native, interpret=interpret)
        assert got.shape == (m, n)
        start = 0
        for e, size in enumerate(sizes):
            rows = slice(start, start + size)
            values = parts[e].values * (1.0 if factor is None else float(factor[e]))
            assert_product(got[rows], wanted[rows], values, f64(bias[e]))
            start += size
        np.testing.assert_array_equal(got[start:], 0)


def test_api_checks_and_explains():
    q = weight(8, 64)
    w = expert_stack(q.codes[None], q.scales[None], "mxfp4")
    x = jnp.ones((3, 64), jnp.bfloat16)
    assert grouped_matmul(x[:0], w, jnp.zeros(1, jnp.int32)).shape == (0, 8)
    with pytest.raises(BlockShapeError, match="one size for each of 1 experts"):
        grouped_matmul(x, w, jnp.array([1, 2]))
    with pytest.raises(BlockShapeError, match=r"is not \[M, 64\]"):
        grouped_matmul(x[:, :32], w, jnp.array([3]))
    with pytest.raises(BlockShapeError, match=r"bias \(8,\)"):
        grouped_matmul(x, w, jnp.array([3]), bias=jnp.ones(8))
    if jax.default_backend() != "gpu":
        with pytest.raises(BackendUnsupported, match=r"triton cannot run here: .*What can: xla"):
            grouped_matmul(x, w, jnp.array([3]), implementation="triton")


def test_variants_are_bounded():
    """A compiled variant is a static problem and a config: configs come from few."""
    configs = {triton_generic.generic_config(m, 4096, native) for m in range(1, 9000, 7) for native in (False, True)}
    assert len(configs) <= 4
