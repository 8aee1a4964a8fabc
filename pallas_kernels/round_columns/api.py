"""The entry of round_columns: arguments and the choice of implementation."""

from __future__ import annotations

from collections.abc import Callable

import jax

from mxjax import backend
from pallas_kernels._dispatch import Candidate, pick, triton_obstacle
from pallas_kernels.round_columns import reference, triton


def round_columns(
    w: jax.Array, u: jax.Array, scale_bytes: jax.Array, rounder: Callable, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Rounds columns in order, each after the errors of those before it: the inner loop of GPTQ.

    For ``i = 0, 1, ..``::

        v_i = w_i - sum_{j<i} u_ji e_j        q_i = round(v_i)        e_i = (v_i - q_i) / u_ii

    Args:
      w: float32 [C, N]: C columns of a weight with N rows, stored transposed. C is a power of two.
      u: float32 [C, C], upper triangular with a diagonal that is not zero.
      scale_bytes: uint8 [C, N], the scale byte of each value.
      rounder: ``(values float32 [N], bytes uint8 [N]) -> (codes uint8 [N], rounded values float32 [N])``, elementwise.
      implementation: None (Triton on a GPU, else XLA), "xla" or "triton". They sum in different orders, so a value that
        lies within float32 rounding of a tie may fall to the other side.

    Returns:
      ``e`` float32 [C, N] and the codes uint8 [C, N].

    Raises:
      BackendUnsupported: a forced implementation that cannot run here.

    Paper: GPTQ, arXiv 2210.17323.
    """
    args = (w, u, scale_bytes, rounder)
    candidates = [
        Candidate("triton", lambda: triton.round_columns(*args), triton_obstacle(backend.target())),
        Candidate("xla", lambda: reference.round_columns(*args)),
    ]
    return pick("round_columns", implementation, candidates).run()
