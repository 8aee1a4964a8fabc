"""Scale policies: the golden tables of the peers, and an independent float64 quantizer, code for code."""

import re

import core_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.core import codec, packing, scales
from mxjax.core.formats import E2M1, E4M3, FORMATS, MXFP4, NVFP4
from mxjax.core.quantize import quantize_array, quantize_blocks
from mxjax.errors import FormatError

MX = [f for f in FORMATS.values() if f.scale == "e8m0"]
POWER_POLICIES = ["floor", "even", "ceil", "rceil"]
EPS = 2.0**-24  # one float32 rounding is off by at most this, relatively


def codes_of(q):
    return np.asarray(q.blocked_codes())


def block(*values, size=32):
    return np.float32([*values, *[0] * (size - len(values))])


# amax -> bytes by floor, even, ceil, rceil, third (numeric_facts 4.2 and trap 1)
GOLDEN_BYTES = [
    (1.0, 125, 125, 125, 125, 127),
    (1.49, 125, 125, 126, 125, 127),
    (1.5, 125, 125, 126, 125, 127),
    (1.75, 125, 126, 126, 126, 127),
    (3.0, 126, 126, 127, 126, 128),
    (4.0, 127, 127, 127, 127, 129),
    (6.0, 127, 127, 128, 127, 129),
    (6.5, 127, 127, 128, 128, 129),
    (6.9, 127, 127, 128, 128, 129),
    (7.0, 127, 128, 128, 128, 129),
    (7.5, 127, 128, 128, 128, 129),
    (7.99, 127, 128, 128, 128, 129),
    (7.9999995, 127, 128, 128, 128, 129),
    (np.nextafter(np.float32(8), np.float32(0)), 127, 128, 128, 128, 129),
    (8.0, 128, 128, 128, 128, 130),
    (2.0**127, 252, 252, 252, 252, 254),
    (ref.FLT_MAX, 252, 253, 253, 253, 254),
]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("column", "policy"), list(enumerate([*POWER_POLICIES, "third"], 1)))
def test_golden_scale_bytes(column, policy, sign):
    x = np.stack([block(0, sign * row[0]) for row in GOLDEN_BYTES])
    assert quantize_array(x, "mxfp4", scale=policy).scales[:, 0].tolist() == [row[column] for row in GOLDEN_BYTES]


@pytest.mark.parametrize("policy", ["floor", "even", "rceil"])
def test_golden_tie_bytes(policy):
    """numeric_facts 4.1: the one vector that tells all rounding rules of the peers apart."""
    v = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]
    q = quantize_array(block(*v, *[-a for a in v], 0.5, -0.5), "mxfp4", scale=policy)
    assert q.scales.tolist() == [127]
    assert q.codes[:9].tolist() == [32, 66, 100, 118, 168, 202, 236, 254, 145]


# first element -> byte, first code, by floor and by rceil (numeric_facts 4.3, "right" where the peers differ)
SPECIAL = [
    (0.0, (0, 0), (0, 0)),
    (-0.0, (0, 0), (0, 0)),
    (6 * 2.0**-127, (0, 7), (0, 7)),
    (2.0**-126, (0, 4), (0, 4)),
    (2.0**-127, (0, 2), (0, 2)),
    (2.0**-130, (0, 0), (0, 0)),
    (1e-45, (0, 0), (0, 0)),
    (ref.FLT_MAX, (252, 7), (253, 6)),
]


@pytest.mark.parametrize(("value", "floor", "rceil"), SPECIAL)
def test_golden_special_blocks(value, floor, rceil):
    for policy, expected in (("floor", floor), ("rceil", rceil)):
        q = quantize_array(block(value), "mxfp4", scale=policy)
        assert (int(q.scales[0]), int(q.codes[0]) & 15) == expected


def test_all_negative_zeros_become_plain_zeros():
    for fmt in FORMATS:
        q = quantize_array(np.full(32, -0.0, np.float32), fmt)
        assert not np.asarray(q.codes).any() and not np.asarray(q.scales).any()
        values = np.asarray(q.dequantize())
        assert not values.any() and not np.signbit(values).any()


# --- every format and policy against float64 -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POWER_POLICIES)
@pytest.mark.parametrize("fmt", MX, ids=str)
def test_mx_equals_the_float64_reference(fmt, policy):
    """Scaling by a power of two and rounding once are exact, so no element may differ, at any magnitude."""
    x = ref.wild(np.random.default_rng(0), (2000, 32))
    codes, byte, _ = ref.quantize_mx(x, fmt, policy)
    q = quantize_array(x, fmt, scale=policy)
    np.testing.assert_array_equal(q.scales[:, 0], byte)
    np.testing.assert_array_equal(codes_of(q)[:, 0], codes)
    values = np.clip(
        ref.decode(codes, fmt.element) * np.ldexp(1.0, byte[:, None].astype(int) - 127), -ref.FLT_MAX, None
    )
    np.testing.assert_array_equal(q.dequantize(), np.minimum(values, ref.FLT_MAX).astype(np.float32))


def test_third_equals_the_float64_reference():
    """3 x 2**-E is rounded to float32 before it becomes a code: excluded is what lies that close to a tie."""
    x = ref.wild(np.random.default_rng(1), (4000, 32))
    codes, byte, v = ref.quantize_mx(x, MXFP4, "third")
    q = quantize_array(x, "mxfp4", scale="third")
    np.testing.assert_array_equal(q.scales[:, 0], byte)
    decided = ~ref.near_tie(v, E2M1, EPS)
    assert decided.mean() > 0.9999
    np.testing.assert_array_equal(codes_of(q)[:, 0][decided], codes[decided])
    assert np.asarray(q.global_scale) == np.float32(1 / 3)


def mse_reference(x, fmt):
    """(floor's byte and its neighbours, their float64 squared errors), blocks last."""
    base = ref.e8m0_bytes(np.abs(x).max(-1), fmt.element, "floor").astype(int)
    candidates = np.clip(np.stack([base, base + 1, base - 1]), 0, 254)
    scale = np.ldexp(1.0, candidates - 127)[..., None]
    errors = np.square(ref.decode(ref.encode(x / scale, fmt.element), fmt.element) * scale - x).sum(-1)
    return candidates, errors


@pytest.mark.parametrize("fmt", MX, ids=str)
def test_mse_is_the_best_neighbour(fmt):
    x = ref.wild(np.random.default_rng(2), (2000, 32)).astype(np.float64)
    q = quantize_array(x.astype(np.float32), fmt, scale="mse")
    candidates, errors = mse_reference(x, fmt)
    byte = np.asarray(q.scales)[:, 0].astype(int)
    zero = ~x.any(-1)
    assert (zero | (candidates == byte).any(0)).all()
    chosen = np.where(candidates == byte, errors, np.inf).min(0)
    # Each float32 error is a sum of 32 squares of differences, each rounded once: (32 + 3) EPS off, relatively.
    assert (zero | (chosen <= errors.min(0) * (1 + 2 * 35 * EPS))).all()
    assert (byte != candidates[0]).any()  # it does choose
    codes = ref.encode(np.ldexp(x, 127 - byte[:, None]), fmt.element)
    np.testing.assert_array_equal(codes_of(q)[:, 0], np.where(zero[:, None], 0, codes))


# --- NVFP4 -----------------------------------------------------------------------------------------------------------


def nv_inputs(seed, rows=3000):
    """Blocks of 16 whose scales cover all of E4M3, and then some below it."""
    rng = np.random.default_rng(seed)
    return np.ldexp(rng.standard_normal((rows, 16)), rng.integers(-24, 4, (rows, 1))).astype(np.float32)


def e4m3(v):
    return ref.decode(ref.encode(v, E4M3), E4M3)


def test_nvfp4_tensor_scale():
    for amax in (1.0, 448 * 6, 3e38, 1e-30):
        q = quantize_array(block(amax, size=16), "nvfp4")
        np.testing.assert_allclose(np.float64(q.global_scale), np.float32(amax) / 2688.0, rtol=2 * EPS)
        q = quantize_array(block(amax, size=16), "nvfp4", scale="four_over_six")
        np.testing.assert_allclose(np.float64(q.global_scale), np.float32(amax) / 1536.0, rtol=2 * EPS)


@pytest.mark.parametrize("policy", POWER_POLICIES)
@pytest.mark.parametrize("magnitude", [2.0**-130, 1.0, 2.0**120])
def test_nvfp4_equals_the_float64_reference(policy, magnitude):
    """Few float32 roundings lie between x and its byte or code: excluded is what lies within 6 of them of a tie."""
    x = np.float32(nv_inputs(3) * magnitude)
    q = quantize_array(x, "nvfp4", scale=policy)
    g, byte = np.float64(q.global_scale), np.asarray(q.scales)[:, 0]
    x = x.astype(np.float64)
    wanted = np.clip(np.abs(x).max(-1) / 6 / g, 2.0**-9, 448.0)
    nearest = ref.encode(wanted, E4M3).astype(int)
    if policy == "floor":
        nearest -= ref.decode(nearest.astype(np.uint8), E4M3) > wanted
    elif policy != "even":
        nearest += ref.decode(nearest.astype(np.uint8), E4M3) < wanted
    grid = np.abs(e4m3(wanted) - wanted) <= 6 * EPS * wanted  # a value of the grid itself: up and down change there
    decided = ~ref.near_tie(wanted, E4M3, 6 * EPS) & ((policy == "even") | ~grid | (wanted == 2.0**-9))
    zero = ~x.any(-1)
    assert (decided & ~zero).mean() > 0.9 or magnitude < 1
    np.testing.assert_array_equal(byte[decided & ~zero], nearest[decided & ~zero])
    assert not byte[zero].any()
    v = x / (np.where(zero, 1.0, ref.decode(byte, E4M3)) * g)[:, None]
    decided = ~ref.near_tie(v, E2M1, 6 * EPS) & ~zero[:, None]
    assert (decided | zero[:, None]).mean() > 0.999 or magnitude < 1
    np.testing.assert_array_equal(codes_of(q)[:, 0][decided], ref.encode(v, E2M1)[decided])


@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize(("policy", "top"), [("even", 6), ("floor", 6), ("ceil", 6), ("four_over_six", 4)])
def test_nvfp4_scale_does_not_hang_on_a_division(policy, top, off, monkeypatch):
    """Every E4M3 number, every tie between two and their neighbours, from a quotient that is off by a whole code."""
    grid = ref.element_values(E4M3)[1:]
    wanted = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32)
    amax = top * wanted  # exact
    amax = np.concatenate([amax, np.nextafter(amax, np.float32(np.inf)), np.nextafter(amax, np.float32(0))])
    exact = np.clip(amax.astype(np.float64) / top, 2.0**-9, 448.0)
    nearest = ref.encode(exact, E4M3).astype(int)
    guess = jnp.asarray(np.clip(nearest + off, 1, E4M3.max_code))
    if policy in ("floor", "ceil"):
        value = ref.decode(nearest.astype(np.uint8), E4M3)
        nearest += (value < exact).astype(int) if policy == "ceil" else -(value > exact).astype(int)
    with monkeypatch.context() as patched:
        patched.setattr(codec, "encode", lambda *_: guess)
        if policy == "four_over_six":
            got = scales._nearest_e4m3(jnp.asarray(amax), jnp.float32(1), 4.0)
        else:
            got = scales.e4m3_bytes(None, jnp.asarray(amax), jnp.float32(1), NVFP4, policy)
    np.testing.assert_array_equal(got, nearest)


def test_nvfp4_codes_need_no_division():
    """Compilers' divisions are inexact, and a code that lies on a tie would fall to either side."""
    x = np.ones((3, 4, 16), np.float32)
    text = jax.jit(quantize_blocks, static_argnums=(1, 2)).lower(x, NVFP4, "even").as_text()
    assert re.search(r"stablehlo.divide.*tensor<3x4xf32>", text)
    assert not re.search(r"stablehlo.divide.*tensor<3x4x16xf32>", text)


def nv_error(unit, scale):
    """float64 squared errors of blocks under E4M3 scale values, and the float32 error those may carry."""
    d = ref.decode(ref.encode(unit / scale[:, None], E2M1), E2M1) * scale[:, None] - unit
    # d is a difference of numbers of up to 6 * scale, each within 4 EPS; then 16 squares are added.
    slack = 2 * np.abs(d).sum(-1) * 8 * EPS * np.maximum(6 * scale, np.abs(unit).max(-1)) + 40 * EPS * (d**2).sum(-1)
    return np.square(d).sum(-1), slack


def test_nvfp4_mse_is_the_best_neighbour():
    x = nv_inputs(4)
    q = quantize_array(x, "nvfp4", scale="mse")
    unit = x.astype(np.float64) / np.float64(q.global_scale)
    nearest = ref.encode(np.clip(np.abs(unit).max(-1) / 6, 2.0**-9, 448.0), E4M3).astype(int)
    candidates = np.clip(nearest + np.array([[0], [1], [-1]]), 1, E4M3.max_code)
    errors, slack = zip(*(nv_error(unit, ref.decode(c.astype(np.uint8), E4M3)) for c in candidates), strict=True)
    byte = np.asarray(q.scales)[:, 0]
    chosen, chosen_slack = nv_error(unit, ref.decode(byte, E4M3))
    tie = ref.near_tie(np.abs(unit).max(-1) / 6, E4M3, 6 * EPS)
    assert tie.mean() < 0.01
    assert (tie | (np.abs(byte.astype(int) - nearest) <= 1)).all()
    assert (tie | (chosen <= np.min(errors, 0) + chosen_slack + np.max(slack, 0))).all()
    assert (byte != nearest).mean() > 0.1


def test_four_over_six_is_the_published_rule():
    """Transcribed from the paper's reference: amax to 6, or to 4 where that has the strictly smaller error."""
    x = nv_inputs(5).astype(np.float64)
    s_enc = 6 * 256 / np.abs(x).max()
    amax = np.abs(x).max(-1)
    wanted = [np.clip(k * amax / 6 * s_enc, 2.0**-9, 448.0) for k in (1.0, 1.5)]
    c6, c4 = (ref.encode(w, E4M3) for w in wanted)
    (e6, slack6), (e4, slack4) = (nv_error(x * s_enc, ref.decode(c, E4M3)) for c in (c6, c4))
    expected = np.where(e4 < e6, c4, c6)
    decided = (np.abs(e4 - e6) > slack4 + slack6) | (c4 == c6)
    decided &= ~ref.near_tie(wanted[0], E4M3, 6 * EPS) & ~ref.near_tie(wanted[1], E4M3, 6 * EPS)
    assert decided.mean() > 0.99
    byte = np.asarray(quantize_array(x.astype(np.float32), "nvfp4", scale="four_over_six").scales)[:, 0]
    np.testing.assert_array_equal(byte[decided], expected[decided])
    assert 0.1 < (byte[decided] == c4[decided]).mean() < 0.9


def test_nvfp4_golden_cases():
    """numeric_facts 4.6."""
    q = quantize_array(np.stack([block(6, 3, -6, size=16), block(1e-6, 5e-7, size=16), block(size=16)]), "nvfp4")
    assert q.scales[:, 0].tolist() == [126, 1, 0]
    q = quantize_array(np.stack([block(2688, size=16), block(6e-3, size=16)]), "nvfp4")
    assert q.scales[:, 0].tolist() == [126, 1] and codes_of(q)[:, 0, 0].tolist() == [7, 5]
    q = quantize_array(np.stack([block(1, size=16), block(1 / 7168, size=16)]), "nvfp4")
    assert q.scales[:, 0].tolist() == [126, 24] and codes_of(q)[:, 0, 0].tolist() == [7, 7]


def test_nvfp4_all_zero_tensor():
    q = quantize_array(np.zeros((2, 32), np.float32), "nvfp4")
    assert float(q.global_scale) == 1.0
    assert not np.asarray(q.scales).any() and not np.asarray(q.codes).any()
    assert not np.asarray(q.dequantize()).any()


@pytest.mark.parametrize("policy", ["even", "four_over_six"])
def test_nvfp4_all_zero_expert_beside_others(policy):
    x = np.stack([np.zeros((4, 32)), np.ones((4, 32))]).astype(np.float32)
    q = quantize_array(x, "nvfp4", scale=policy, batch_axes=1)
    assert q.global_scale.shape == (2,) and float(q.global_scale[0]) == 1.0
    np.testing.assert_allclose(q.dequantize(), x, rtol=2**-22)


def test_nvfp4_scale_underflow_is_clamped():
    """A block far below the tensor's amax keeps scale 2**-9, so it loses values only under half a step."""
    x = np.stack([block(1, size=16), block(1e-30, size=16)])
    q = quantize_array(x, "nvfp4")
    assert q.scales[:, 0].tolist() == [126, 1]
    np.testing.assert_array_equal(q.dequantize()[1], np.zeros(16))


def test_policies_that_do_not_fit_raise():
    with pytest.raises(FormatError, match="unknown scale policy 'best'; known: floor"):
        quantize_array(np.zeros(32), "mxfp4", scale="best")
    with pytest.raises(FormatError, match="'third' is made for mxfp4"):
        quantize_array(np.zeros(32), "mxfp8_e4m3", scale="third")
    with pytest.raises(FormatError, match="'four_over_six' needs E4M3"):
        quantize_array(np.zeros(32), "mxfp4", scale="four_over_six")


def test_nearest_power_of_two_vector():
    """numeric_facts 4.5: the powers of two that "even" rounds amax to: four times its E2M1 scale."""
    pairs = [(5.687891, 4), (7.290238, 8), (0.073246, 0.0625), (0.965272, 1), (1.501562, 1), (0.224199, 0.25)]
    pairs += [(8.571118, 8), (0.379829, 0.25), (4.003352, 4), (2.485657, 2), (0.451778, 0.5), (0.040571, 0.03125)]
    byte = scales.e8m0_bytes(jnp.float32([p[0] for p in pairs]).view(jnp.int32), E2M1, "even")
    np.testing.assert_array_equal(np.ldexp(4.0, np.asarray(byte) - 127), [p[1] for p in pairs])


def test_packing_of_a_quantized_row():
    q = quantize_array(block(6, 0.5, -1), "mxfp4")
    assert packing.unpack(q.codes, 4)[:3].tolist() == [7, 1, 10] and NVFP4.packed_size(16) == 8
