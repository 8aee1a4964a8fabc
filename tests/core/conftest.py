"""``run``: one elementwise function of arrays, executed in every way that mxjax code is executed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

ROWS = 4  # steps of the scan, lanes of the vmap


def _pallas(fn, *arrays):
    def kernel(*refs):
        refs[-1][...] = fn(*[r[...] for r in refs[:-1]])

    return pl.pallas_call(kernel, out_shape=jax.eval_shape(fn, *arrays), interpret=True)(*arrays)


MODES = {
    "eager": lambda fn, *arrays: fn(*arrays),
    "jit": lambda fn, *arrays: jax.jit(fn)(*arrays),
    "scan": lambda fn, *arrays: jax.lax.scan(lambda c, row: (c, fn(*row)), 0, arrays)[1],
    "vmap": lambda fn, *arrays: jax.vmap(fn)(*arrays),
    "pallas": _pallas,
}


@pytest.fixture(params=list(MODES))
def run(request):
    """``run(fn, *flat numpy arrays)`` -> flat numpy result of ``fn`` in the mode of this parametrization."""

    def call(fn, *arrays):
        n = arrays[0].size
        length = 1 << max(10, (n - 1).bit_length())  # few distinct shapes: eager operations are compiled once for all
        rows = [jnp.asarray(np.pad(a, (0, length - n)).reshape(ROWS, -1)) for a in arrays]
        return np.asarray(MODES[request.param](fn, *rows)).reshape(-1)[:n]

    return call
