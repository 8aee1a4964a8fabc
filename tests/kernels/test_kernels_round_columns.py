"""round_columns: the Triton kernel (interpreted here) against the equations in float64 and against the XLA loop."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.algorithms.observers import decode_unit, round_unit
from mxjax.core.formats import MXFP4, MXFP6_E2M3, NVFP4
from mxjax.errors import BackendUnsupported
from pallas_kernels.round_columns import reference, round_columns, triton

CASES = [(MXFP4, 70), (NVFP4, 32), (MXFP6_E2M3, 1), (MXFP4, 0)]


def problem(fmt, n):
    keys = jax.random.split(jax.random.key(n), 3)
    bs = fmt.block_size
    w = jax.random.normal(keys[0], (bs, n))
    u = jnp.triu(0.2 * jax.random.normal(keys[1], (bs, bs)), 1) + jnp.diag(1 + jax.random.uniform(keys[2], (bs,)))
    byte = jnp.full((bs, n), 0x30 if fmt is NVFP4 else 126, jnp.uint8).at[:, ::3].add(1)
    return w, u, byte, partial(round_unit, fmt=fmt)


def interpreted(*args):
    return triton.round_columns(*args, interpret=True)


@pytest.mark.parametrize("run", [reference.round_columns, interpreted], ids=["xla", "triton"])
@pytest.mark.parametrize(("fmt", "n"), CASES, ids=str)
def test_follows_the_equations(run, fmt, n):
    """Each code is that of the value the equations give in float64 from the errors before it."""
    w, u, byte, rounder = problem(fmt, n)
    errors, codes = map(np.asarray, run(w, u, byte, rounder))
    assert errors.shape == codes.shape == w.shape
    e, u64 = errors.astype(np.float64), np.asarray(u, np.float64)
    v = np.asarray(w, np.float64) - np.triu(u64, 1).T @ e
    # float32 sums of at most C + 1 terms, each rounded: |v - v64| <= (C + 1) 2^-24 (|w| + sum |u e|).
    slack = (fmt.block_size + 1) * 2.0**-24 * (np.abs(w) + np.triu(np.abs(u64), 1).T @ np.abs(e)) + 1e-30
    low, high = (rounder(jnp.asarray(v + s * slack, jnp.float32), byte)[0] for s in (-1, 1))
    assert np.all((codes == low) | (codes == high))
    value = np.asarray(decode_unit(jnp.asarray(codes), byte, fmt), np.float64)
    # One subtraction and one division after v, each rounded once.
    np.testing.assert_array_less(np.abs(e * np.diag(u64)[:, None] - (v - value)), slack + 2.0**-22 * np.abs(v - value))


def test_batched_by_vmap():
    """A stack of problems gives each problem's own result: vmap adds a grid axis to the kernel."""
    w, u, byte, rounder = problem(MXFP4, 40)
    stack = jnp.stack([w, 2 * w, -w])
    together = jax.vmap(lambda w: interpreted(w, u, byte, rounder))(stack)
    for i in range(3):
        alone = interpreted(stack[i], u, byte, rounder)
        assert all(np.array_equal(a[i], b) for a, b in zip(together, alone, strict=True))


def test_forcing_triton_on_a_cpu_says_why():
    with pytest.raises(BackendUnsupported, match=r"round_columns: triton cannot run here: .*NVIDIA"):
        round_columns(*problem(MXFP4, 8), implementation="triton")
