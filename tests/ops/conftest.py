"""Float32 products in float32, also on a GPU: these tests compare with float64 within the rounding of float32.

A GPU multiplies float32 in TF32 unless it is told otherwise: operands rounded to 11 bits, errors of 2**-11 in place of
2**-24. That also turns a value that saturated at the largest float32, as 3e38 does in MXFP4, into infinity: TF32's next
number is 2**128. The precision belongs to the caller (``qdot(precision=)`` or this setting), not to the product.
"""

import jax
import pytest


@pytest.fixture(autouse=True)
def float32_products():
    if jax.default_backend() != "gpu":
        yield
        return
    with jax.default_matmul_precision("highest"):
        yield
