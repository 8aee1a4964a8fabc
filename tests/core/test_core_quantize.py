"""quantize_array and fake_quantize: axes, shapes, dtypes, special values, gradients, messages."""

import core_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mxjax.core.formats import FORMATS, MXFP4
from mxjax.core.quantize import fake_quantize, quantize_array, quantize_blocks
from mxjax.core.scales import POLICIES
from mxjax.errors import BlockShapeError, FormatError, NonFiniteError

PAIRS = [
    (fmt, policy)
    for fmt in FORMATS
    for policy in POLICIES
    if not (policy == "third" and fmt != "mxfp4") and not (policy == "four_over_six" and fmt != "nvfp4")
]


def pairs(chosen):
    return pytest.mark.parametrize(("fmt", "policy"), chosen, ids=["-".join(pair) for pair in chosen])


every_pair = pairs(PAIRS)
# Where formats differ by their element alone, one policy of the larger ones is enough: each pair costs a compilation.
some_pairs = pairs([p for p in PAIRS if p[0] in ("mxfp4", "nvfp4") or p[1] == "even"])


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert jax.tree.structure(a) == jax.tree.structure(b)


# --- axes, shapes, dtypes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "mxfp6_e2m3"])
def test_any_axis_is_the_last_axis_of_a_transposed_array(fmt, axis):
    shape = [3, 5, 2]
    shape[axis] = 64
    x = normal(*shape)
    q = quantize_array(x, fmt, axis)
    moved = quantize_array(np.moveaxis(x, axis, -1), fmt)
    np.testing.assert_array_equal(q.codes, moved.codes)
    np.testing.assert_array_equal(q.scales, moved.scales)
    assert q.shape == x.shape and q.axis == axis % 3 - 3
    np.testing.assert_array_equal(q.dequantize(), np.moveaxis(moved.dequantize(), -1, axis))


def test_non_contiguous_input():
    x = normal(128, 20)
    for view in (x.T, x[::2], x[:, ::-1].T[::3], np.broadcast_to(x[:1, :1], (4, 64)), np.asfortranarray(x.T)):
        axis = int(np.argmax(view.shape))
        assert_same(quantize_array(view, "mxfp4", axis), quantize_array(view.copy(order="C"), "mxfp4", axis))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("shape", "axis"), [((0, 64), -1), ((3, 0), -1), ((2, 0, 64), 2), ((0, 64), 0)], ids=str)
def test_zero_size_dimensions(fmt, shape, axis):
    q = quantize_array(np.zeros(shape, np.float32), fmt, axis).validate()
    assert q.shape == shape and q.dequantize().shape == shape
    assert fake_quantize(jnp.zeros(shape), fmt, axis).shape == shape


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_narrow_input_is_computed_in_float32(fmt, dtype):
    spread = jnp.asarray(normal(64, 64) * np.float32(2.0) ** np.arange(-20, 12, 0.5)[:, None], dtype)
    tiny = np.arange(1, 65, dtype=np.uint16).view(np.dtype(dtype))  # subnormals of the dtype
    for x in (spread, jnp.asarray(tiny)):
        q = quantize_array(x, fmt)
        wide = quantize_array(np.asarray(x).astype(np.float32), fmt)
        np.testing.assert_array_equal(q.codes, wide.codes)
        np.testing.assert_array_equal(q.scales, wide.scales)
        assert q.dtype == dtype and q.dequantize().dtype == dtype and q.dequantize(jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "mxfp6_e3m2"])
@pytest.mark.parametrize("size", [1, 33])
def test_padding_is_zeros_that_nobody_sees(fmt, size):
    x = normal(3, size) - 5  # all of one sign: a padding lane would show in a maximum or a sign
    q = quantize_array(x, fmt, on_uneven="pad").validate()
    padded = quantize_array(np.pad(x, ((0, 0), (0, -size % 32))), fmt)
    blocks = q.scales.shape[-1]
    np.testing.assert_array_equal(q.scales, padded.scales[:, :blocks])
    np.testing.assert_array_equal(q.codes, padded.codes[:, : q.codes.shape[-1]])
    assert q.shape == (3, size)
    np.testing.assert_array_equal(q.dequantize(), padded.dequantize()[:, :size])
    np.testing.assert_array_equal(fake_quantize(x, fmt), q.dequantize())


@some_pairs
def test_batch_axes_is_vmap(fmt, policy):
    x = normal(3, 4, 64) * np.float32([1, 100, 1e-6])[:, None, None]
    batched = quantize_array(x, fmt, scale=policy, batch_axes=1)
    mapped = jax.vmap(lambda row: quantize_array(row, fmt, scale=policy))(x)
    assert_same(batched, mapped)
    single = quantize_array(x[1], fmt, scale=policy)
    assert_same(jax.tree.map(lambda leaf: leaf[1], batched), single)


def test_given_global_scale():
    x = normal(4, 64)
    q = quantize_array(x, "nvfp4")
    assert_same(quantize_array(x, "nvfp4", global_scale=q.global_scale), q)
    # For MX formats it is an extra multiplier: a power of two moves into the scale bytes.
    q, scaled = quantize_array(x, "mxfp4"), quantize_array(x, "mxfp4", global_scale=jnp.float32(4.0))
    np.testing.assert_array_equal(scaled.codes, q.codes)
    np.testing.assert_array_equal(scaled.scales, q.scales - 2)
    np.testing.assert_array_equal(scaled.dequantize(), q.dequantize())


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_given_global_scale_keeps_small_values(fmt):
    """x / global is subnormal or needs the smallest scale byte: still within half a step, E2M1's at that byte."""
    g = np.float32(1.5)
    x = np.float32([2.0**-126, 1.4 * 2.0**-126, 3 * 2.0**-127, 4 * 2.0**-126, 2.0**-149, 0, 0, 0] * 4)
    if fmt == "nvfp4":
        g, x = np.float32(1.5 * 2.0**-126), np.float32(2.0**-8 * x * 2.0**126) * np.float32(2.0**-126)
    q = quantize_array(x, fmt, global_scale=g)
    byte = np.asarray(q.scales).astype(int)[0]
    step = np.ldexp(1.0, byte - 127) if fmt == "mxfp4" else ref.decode(np.uint8([byte]), FORMATS["mxfp8_e4m3"].element)
    error = np.abs(np.asarray(q.dequantize()).astype(np.float64) - x)
    assert (error <= step * np.float64(g) * np.where(np.abs(x) > 4 * step * g, 1.0, 0.5) + 2.0**-149).all()


# --- values ----------------------------------------------------------------------------------------------------------


@every_pair
def test_error_is_bounded_by_half_a_step_or_clipping(fmt, policy):
    """Subnormal blocks included: no policy may lose them (each MX policy's scale stays under 2 amax / max_value)."""
    f = FORMATS[fmt]
    x = ref.wild(np.random.default_rng(1), (200, 32))
    if fmt == "nvfp4":  # one tensor scale spans 2**17 only, so each row gets its own
        q = quantize_array(x, fmt, scale=policy, batch_axes=1)
    else:
        q = quantize_array(x, fmt, scale=policy)
    amax = np.abs(x.astype(np.float64)).reshape(200, -1, f.block_size).max(-1, keepdims=True)
    error = np.abs(np.asarray(q.dequantize()).astype(np.float64) - x).reshape(200, -1, f.block_size)
    # The largest step is 2**(emax - mantissa bits) scales. Scales are at most 2 amax / 2**emax, or the smallest one,
    # and clipping loses at most 2**(emax + 1) - max_value scales, of the policies that let amax reach that far.
    e = f.element
    if f.scale == "e8m0":
        scale = np.maximum(2 * amax / 2.0**e.max_exponent, 2.0**-127)
    else:
        g = np.asarray(q.global_scale).astype(np.float64)[:, None, None]
        scale = np.maximum(1.5 * 1.125 * amax / 6, 2.0**-9 * g)
    step = 2.0 ** (e.max_exponent - e.mantissa_bits) * scale
    assert (error <= np.maximum(step, 2.0 ** (e.max_exponent + 1) * scale / 2 - e.max_value * scale / 2)).all()


@pairs([p for p in PAIRS if p[0] != "nvfp4"])
def test_subnormal_blocks_within_one_step(fmt, policy):
    """numeric_facts 4.3: blocks of float32 subnormals, where the smallest scale 2**-127 has to do."""
    f = FORMATS[fmt].element
    fractions = np.random.default_rng(2).integers(0, 1 << 23, (200, 32)) >> np.arange(200)[:, None] % 23
    x = np.int32(fractions).view(np.float32)
    q = quantize_array(x, fmt, scale=policy)
    step = 2.0 ** (f.max_exponent - f.mantissa_bits)  # the widest of the format; 1 for INT8's 1/64 grid is generous
    byte = np.asarray(q.scales).astype(int)
    error = np.abs(np.asarray(q.dequantize()).astype(np.float64) - x)
    assert (error <= np.ldexp(step, byte - 127)).all() and (byte <= 3).all()
    if policy != "third":
        exact = np.asarray(q.dequantize())
        largest = np.abs(x).max(-1) >= 2.0 ** (f.min_exponent - f.mantissa_bits - 127)
        assert (np.abs(exact).max(-1)[largest] > 0).all()  # not flushed


@pairs([p for p in PAIRS if p[1] != "third" and p[0] != "nvfp4"])
def test_second_pass_changes_no_value(fmt, policy):
    """Numeric_facts trap 8. ``third`` is no projection: a value rounded up to 6 thirds moves its block to the next."""
    first = quantize_array(ref.wild(np.random.default_rng(3), (200, 32)), fmt, scale=policy)
    values = first.dequantize()
    second = quantize_array(values, fmt, scale=policy)
    np.testing.assert_array_equal(second.dequantize(), values)
    if policy in ("floor", "even"):
        nonzero = np.asarray(values).any(-1)
        np.testing.assert_array_equal(np.asarray(second.scales)[nonzero], np.asarray(first.scales)[nonzero])


def test_second_pass_changes_no_value_nvfp4():
    x = normal(200, 64)
    first = quantize_array(x, "nvfp4")
    second = quantize_array(first.dequantize(), "nvfp4", global_scale=first.global_scale)
    np.testing.assert_array_equal(second.dequantize(), first.dequantize())


bit_patterns = hnp.arrays(np.int32, (2, 32), elements=st.integers(-(1 << 31), (1 << 31) - 1))


@every_pair
@settings(deadline=None, max_examples=25)
@given(bits=bit_patterns)
def test_no_finite_input_yields_nan(fmt, policy, bits):
    x = bits.view(np.float32)
    finite = np.where(np.isfinite(x), x, np.float32(-1e-42))
    assert np.isfinite(quantize_array(finite, fmt, scale=policy).dequantize()).all()
    # and of any input, exactly the blocks that hold NaN or Inf are NaN
    q = quantize_array(x, fmt, scale=policy, on_nonfinite="nan")
    blocks = (2, 32 // FORMATS[fmt].block_size, FORMATS[fmt].block_size)
    bad = ~np.isfinite(x).reshape(blocks).all(-1)
    np.testing.assert_array_equal(np.asarray(q.scales) == 255, bad)
    values = np.asarray(q.dequantize()).reshape(blocks)
    assert np.isnan(values[bad]).all() and np.isfinite(values[~bad]).all()


# --- NaN and Inf -----------------------------------------------------------------------------------------------------


def poisoned(*bad):
    x = normal(2, 64)
    x[0, : len(bad)] = bad
    return x


@pytest.mark.parametrize("bad", [[np.nan], [np.inf], [-np.inf, 1, np.nan]], ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_nonfinite_values_raise_with_path_and_count(fmt, bad):
    count = int((~np.isfinite(bad)).sum())
    with pytest.raises(
        NonFiniteError, match=rf"layer/kernel: {count} of 128 values are NaN or Inf \(shape \(2, 64\)\)"
    ):
        quantize_array(poisoned(*bad), fmt, path="layer/kernel")


@pytest.mark.parametrize("fmt", FORMATS)
def test_nonfinite_values_poison_their_block_only(fmt):
    size = FORMATS[fmt].block_size
    for q in (
        jax.jit(lambda x: quantize_array(x, fmt))(poisoned(np.inf)),
        quantize_array(poisoned(np.nan), fmt, on_nonfinite="nan"),
    ):
        assert int(q.scales[0, 0]) == 255 and (np.asarray(q.scales).reshape(-1)[1:] < 255).all()
        assert not np.asarray(q.codes[0, : q.codes.shape[1] * size // 64]).any()
        values = np.asarray(q.dequantize())
        assert np.isnan(values[0, :size]).all() and np.isfinite(values[0, size:]).all() and np.isfinite(values[1]).all()
    if fmt == "nvfp4":  # the tensor scale is that of the finite blocks
        assert np.isfinite(q.global_scale)


@pytest.mark.parametrize("fmt", FORMATS)
def test_saturate(fmt):
    x = np.zeros((1, 32), np.float32)
    x[0, :3] = np.nan, np.inf, -np.inf
    values = np.asarray(quantize_array(x, fmt, on_nonfinite="saturate").dequantize())
    assert np.isfinite(values).all() and values[0, 0] == 0 and values[0, 1] == -values[0, 2] > 1e38


def test_all_blocks_bad():
    for fmt in ("mxfp4", "nvfp4"):
        q = quantize_array(np.full((2, 32), np.nan, np.float32), fmt, on_nonfinite="nan")
        assert np.isnan(np.asarray(q.dequantize())).all() and (q.global_scale is None or np.isfinite(q.global_scale))


# --- errors ----------------------------------------------------------------------------------------------------------


def test_error_messages():
    with pytest.raises(FormatError, match="unknown format 'fp4'; known: mxfp4"):
        quantize_array(normal(32), "fp4")
    with pytest.raises(FormatError, match="a/b: only float arrays can be quantized, not int32"):
        quantize_array(np.zeros(32, np.int32), "mxfp4", path="a/b")
    with pytest.raises(BlockShapeError, match="a/b: a scalar has no axis"):
        quantize_array(np.float32(1), "mxfp4", path="a/b")
    with pytest.raises(BlockShapeError, match=r"a/b: axis 2 is outside shape \(2, 32\)"):
        quantize_array(normal(2, 32), "mxfp4", 2, path="a/b")
    with pytest.raises(BlockShapeError, match=r"a/b: axis -1 of shape \(2, 33\) is no multiple.*on_uneven='pad'"):
        quantize_array(normal(2, 33), "mxfp4", path="a/b")
    with pytest.raises(BlockShapeError, match=r"a/b: 1 batch axes do not lie before axis -2 of shape \(32, 2\)"):
        quantize_array(normal(32, 2), "nvfp4", 0, batch_axes=1, path="a/b")
    with pytest.raises(FormatError, match="on_nonfinite is one of"):
        quantize_array(normal(32), "mxfp4", on_nonfinite="ignore")
    with pytest.raises(FormatError, match="on_uneven is 'error' or 'pad'"):
        quantize_array(normal(32), "mxfp4", on_uneven="skip")


# --- fake_quantize ---------------------------------------------------------------------------------------------------


@some_pairs
def test_fake_quantize_is_quantize_then_dequantize(fmt, policy):
    x = normal(4, 64)
    expected = quantize_array(x, fmt, scale=policy).dequantize()
    np.testing.assert_array_equal(fake_quantize(x, fmt, scale=policy), expected)
    np.testing.assert_array_equal(jax.jit(lambda x: fake_quantize(x, fmt, scale=policy))(x), expected)
    assert fake_quantize(jnp.asarray(x, jnp.bfloat16), fmt).dtype == jnp.bfloat16


def test_fake_quantize_raises_on_request():
    assert np.isnan(fake_quantize(poisoned(np.nan), "mxfp4")).any()
    with pytest.raises(NonFiniteError):
        fake_quantize(poisoned(np.nan), "mxfp4", on_nonfinite="raise")


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_gradient_is_straight_through(fmt):
    x, t = jnp.asarray(normal(3, 48)), jnp.asarray(normal(3, 48, seed=1))
    weights = jnp.asarray(normal(3, 48, seed=2))

    def loss(x):
        return jnp.sum(fake_quantize(x, fmt) * weights)

    np.testing.assert_array_equal(jax.grad(lambda x: fake_quantize(x, fmt).sum())(x), jnp.ones_like(x))
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), weights)
    value, tangent = jax.jvp(lambda x: fake_quantize(x, fmt), (x,), (t,))
    np.testing.assert_array_equal(value, fake_quantize(x, fmt))
    np.testing.assert_array_equal(tangent, t)
    np.testing.assert_array_equal(jax.vmap(jax.grad(lambda r: fake_quantize(r, fmt).sum()))(x), jnp.ones_like(x))
    scanned = jax.grad(lambda x: jax.lax.scan(lambda c, r: (c + fake_quantize(r, fmt).sum(), None), 0.0, x)[0])(x)
    np.testing.assert_array_equal(scanned, jnp.ones_like(x))
    remat = jax.grad(jax.checkpoint(loss))(x)
    np.testing.assert_array_equal(remat, weights)


def test_gradient_with_a_given_global_scale():
    x = jnp.asarray(normal(2, 32))
    grad = jax.grad(lambda x, g: fake_quantize(x, "nvfp4", global_scale=g).sum(), argnums=(0, 1))
    dx, dg = grad(x, jnp.float32(0.01))
    np.testing.assert_array_equal(dx, jnp.ones_like(x))
    assert dg == 0


def test_quantize_blocks_is_the_part_below_packing():
    x = normal(2, 64)
    codes, byte, global_scale = quantize_blocks(jnp.asarray(x).reshape(2, 2, 32), MXFP4)
    q = quantize_array(x, "mxfp4")
    np.testing.assert_array_equal(codes, q.blocked_codes())
    np.testing.assert_array_equal(byte, q.scales)
    assert global_scale is None
