"""qdot on weights that are spread over eight (simulated) devices: what one device gives, and what travels."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mxjax
from mxjax.core.formats import MXFP4, MXFP8_E4M3
from mxjax.errors import BlockShapeError, ConfigError
from mxjax.ops.shard_weight import shard_weight
from mxjax.ops.sharded import row_product
from mxjax.report.collectives import collective_bytes
from pallas_kernels.block_scaled_matmul import Epilogue, prepare, triton_generic

pytestmark = pytest.mark.usefixtures("unoptimized")
M, K, N = 8, 256, 64
COLUMNS, ROWS = P(None, "a"), P("a", None)


def mesh_of(kind=AxisType.Auto):
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices, here are {jax.device_count()}; a CPU simulates them (tests/conftest.py)")
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind), devices=jax.devices()[:8])


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def weight(recipe, seed=1, k=K, n=N):
    """ "branch" is MXFP4 with a random low-rank branch in MXFP8: what LoRaQ makes, without its minutes."""
    w = mxjax.quantize({"kernel": normal(seed, k, n)}, "mxfp4" if recipe == "branch" else recipe)["kernel"]
    if recipe != "branch":
        return w
    mxfp8 = mxjax.ActivationFormat(format=MXFP8_E4M3)
    return replace(w, branch=mxjax.LowRank(a=normal(5, 32, k) / 16, b=normal(6, n, 32), activation=mxfp8))


def inputs(dtype=jnp.float32):
    # tokens whose largest values lie in different parts of K and differ in size
    x = normal(0, M, K) * (1 + jnp.arange(K) // 16)
    return x.astype(dtype)


def bound(x, w):
    """Two orders of a float32 sum of K products: K * 2**-23 of the sum of their magnitudes, which none reaches."""
    kernel = jnp.abs(w.dequantize(jnp.float32)) + 1
    return K * 2.0**-23 * float(jnp.max(jnp.abs(x.astype(jnp.float32)) @ kernel))


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile()


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4", "hadamard_mxfp4"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_columns_are_exact_and_send_nothing(recipe, kind):
    w, x = weight(recipe), inputs()
    s = shard_weight(w, mesh_of(kind), COLUMNS)
    program = compiled(mxjax.qdot, x, s)
    assert collective_bytes(program) == {}
    got = jax.jit(mxjax.qdot)(x, s)
    assert got.sharding.spec == P(None, "a") and s.shape == w.shape
    want = jax.jit(mxjax.qdot)(x, w)
    if recipe == "nvfp4":  # sums that float32 rounds, and a product of fewer columns sums in another order
        np.testing.assert_allclose(got, want, rtol=0, atol=bound(x, w))
    else:  # codes times powers of two: the sums are exact in any order
        assert np.array_equal(got, want)


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4", "branch"])
def test_rows_are_one_sum(recipe):
    """NVFP4's token scale is that of the whole token and x A^T is whole before it is rounded; else codes would differ,
    and results by a step of them, thousands of times this bound."""
    w, x = weight(recipe), inputs()
    s = shard_weight(w, mesh_of(), ROWS)
    got, want = jax.jit(mxjax.qdot)(x, s), jax.jit(mxjax.qdot)(x, w)
    np.testing.assert_allclose(got, want, rtol=0, atol=bound(x, w))
    moved = collective_bytes(compiled(mxjax.qdot, x, s))
    assert set(moved) == {"all-reduce"}
    small = M * (w.branch.rank if w.branch is not None else 0) + M * (recipe == "nvfp4")
    assert moved["all-reduce"] == pytest.approx(2 * 3 / 4 * 4 * (M * N + small), abs=2)


def test_partial_results_in_bfloat16_send_half():
    w, x = weight("mxfp4"), inputs(jnp.bfloat16)
    whole, half = (shard_weight(w, mesh_of(), ROWS, reduce_dtype=d) for d in ("float32", "bfloat16"))
    f = jax.shard_map(  # CPU's all-reduce widens bfloat16, so the program before it is asked
        lambda x, w: row_product(x, w, ("a",), reduce_dtype="bfloat16"),
        mesh=mesh_of(), in_specs=(P(None, "a"), jax.tree.unflatten(jax.tree.structure(half.weight), half.specs)),
        out_specs=P(), check_vma=False,
    )  # fmt: skip
    assert "bf16[8,64] = psum" in str(jax.make_jaxpr(f)(x, half.weight))
    got, want = (jax.jit(mxjax.qdot)(x, s).astype(jnp.float32) for s in (half, whole))
    # four parts are rounded once each, and three sums: seven halves of 2**-8 of magnitudes below that of the row
    scale = float(jnp.max(jnp.abs(x.astype(jnp.float32)) @ jnp.abs(w.dequantize(jnp.float32))))
    assert 0 < float(jnp.max(jnp.abs(got - want))) <= 7 * 2.0**-9 * scale


@pytest.mark.parametrize("spec", [COLUMNS, ROWS, P("a", "b")], ids=str)
def test_gathered_weights_travel_as_codes(spec):
    """FSDP: exact, and 4.25 bits a weight for the 16 of bfloat16."""
    w, x = weight("mxfp4"), inputs(jnp.bfloat16)
    s = shard_weight(w, mesh_of(), spec, gather=("a",), batch=("a",))
    got = jax.jit(mxjax.qdot)(x, s)
    assert got.sharding.spec[0] in ("a", ("a",))
    assert np.array_equal(got, jax.jit(mxjax.qdot)(x, w))
    moved = collective_bytes(compiled(mxjax.qdot, x, s))
    part = 1 if spec[1] != "b" else 2
    assert moved["all-gather"] == 3 / 4 * K * N * 4.25 / 8 / part
    mesh = mesh_of()
    kernel = jax.device_put(w.dequantize(jnp.bfloat16), jax.NamedSharding(mesh, spec))
    f = jax.shard_map(
        lambda x, k: x @ jax.lax.all_gather(k, "a", axis=spec.index("a"), tiled=True), mesh=mesh,
        in_specs=(P("a"), spec), out_specs=P("a", spec[1] if spec[1] != "a" else None), check_vma=False,
    )  # fmt: skip
    plain = collective_bytes(compiled(f, x, kernel))
    # the CPU compiler may widen bfloat16 on the way, so at least 16 bits
    assert moved["all-gather"] <= 4.25 / 16 * plain["all-gather"]


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4_a16", "branch"])
@pytest.mark.parametrize("spec, gather", [(COLUMNS, ()), (ROWS, ()), (COLUMNS, ("a",))], ids=str)
def test_packed_for_kernels(recipe, spec, gather):
    w, x = weight(recipe), inputs(jnp.bfloat16)
    one = mxjax.prepare_kernels({"kernel": w})["kernel"]
    s = shard_weight(w, mesh_of(), spec, gather=gather, kernels=True)
    got, want = (jax.jit(mxjax.qdot)(x, v).astype(jnp.float32) for v in (s, one))
    # one rounding to bfloat16 of float32 sums in another order: neighbours at most
    np.testing.assert_allclose(got, want, rtol=2.0**-7, atol=bound(x, w))


def test_a_pallas_kernel_runs_under_shard_map():
    """In interpret mode: four devices, each the kernel on its own columns, and on its own part of K."""
    w, x = weight("mxfp4_a16"), inputs(jnp.bfloat16)
    config = triton_generic.GenericConfig(16, 16, 64, 1, 1)

    def kernel(x, codes, scales):
        packed = prepare(codes, scales, MXFP4, layout="rows")
        return triton_generic.generic(x, None, None, packed, Epilogue(), None, jnp.float32, config, interpret=True)

    def summed(x, codes, scales):
        return jax.lax.psum(kernel(x, codes, scales), "a")

    want = jnp.matmul(x.astype(jnp.float32), w.dequantize(jnp.float32), precision="highest")
    for f, specs, out in ((kernel, (P(), P("a"), P("a")), P(None, "a")), (summed, (P(None, "a"),) * 3, P())):
        run = jax.shard_map(f, mesh=mesh_of(), in_specs=specs, out_specs=out, check_vma=False)
        got = jax.jit(run)(x, w.qtensor.codes, w.qtensor.scales)
        np.testing.assert_allclose(got, want, rtol=0, atol=bound(x, w))


@pytest.mark.parametrize("spec", [COLUMNS, ROWS], ids=str)
def test_gradients(spec):
    w, x = weight("hadamard_mxfp4"), inputs()
    s, g = shard_weight(w, mesh_of(), spec), normal(3, M, N)
    got, want = (jax.jit(jax.grad(lambda x, v=v: jnp.vdot(mxjax.qdot(x, v), g)))(x) for v in (s, w))
    # sums over N (cut or not), then over 32 of the transform
    scale = float(jnp.max(jnp.abs(g) @ jnp.abs(w.dequantize(jnp.float32)).T))
    np.testing.assert_allclose(got, want, rtol=0, atol=(N + 32) * 2.0**-23 * 6 * scale)


def test_more_axes_of_x_and_another_dtype():
    w, x = weight("mxfp4"), inputs().reshape(2, 4, K)
    s = shard_weight(w, mesh_of(), ROWS, batch=("b",))
    got = jax.jit(lambda x, s: mxjax.qdot(x, s, preferred_element_type=jnp.float32))(x.astype(jnp.bfloat16), s)
    assert got.shape == (2, 4, N) and got.dtype == jnp.float32


def test_errors_name_the_way_out():
    mesh, x = mesh_of(), inputs()
    with pytest.raises(BlockShapeError, match=r"up/kernel: axis -2.*'a'.*no multiple of 32"):
        shard_weight(weight("mxfp4", k=96), mesh, ROWS, path="up/kernel")
    with pytest.raises(BlockShapeError, match=r"axis 1 of shape \(256, 66\) is not cut evenly into 4"):
        shard_weight(weight("mxfp4", n=66), mesh, COLUMNS)
    with pytest.raises(ConfigError, match="none named 'c'"):
        shard_weight(weight("mxfp4"), mesh, COLUMNS, gather=("c",))
    with pytest.raises(ConfigError, match="gathered along N, not K"):
        shard_weight(weight("mxfp4"), mesh, ROWS, gather=("a",), kernels=True)
    with pytest.raises(BlockShapeError, match="QWeight of two axes"):
        shard_weight(mxjax.quantize({"k": normal(0, 2, K, N)}, "mxfp4")["k"], mesh, COLUMNS)
    s = shard_weight(weight("mxfp4"), mesh, COLUMNS, batch=("a",))
    with pytest.raises(BlockShapeError, match="cut into 4 parts"):
        mxjax.qdot(x[:3], s)
    with pytest.raises(BlockShapeError, match="does not end in 256"):
        mxjax.qdot(x[:, :64], s)


def test_collective_bytes_reads_all_spellings():
    lines = {
        "  %a = f32[8,64]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%r": {"all-reduce": 2048},
        "  %a = f32[8,64]{1,0} all-reduce(%x), replica_groups=mesh['m'=2,'d'=4] {'d'}": {"all-reduce": 3072},
        "  %a = u8[64,32]{1,0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}": {"all-gather": 1536},
        "  %a = (bf16[4,2], bf16[8,2]) all-gather-start(%x), replica_groups={{0,1}}": {"all-gather": 16},
        "  %a = (f32[4]{0}, f32[4]{0}) all-to-all(%x, %y), replica_groups={{0,1}}": {"all-to-all": 16},
        "  %a = ((f32[4]), f32[4], u32[]) all-to-all-start(%x), replica_groups={{0,1}}": {"all-to-all": 8},
        "  %a = f32[4]{0} all-reduce-start(%x), replica_groups={{0,1}}": {"all-reduce": 16},
        "  %a = f32[4]{0} reduce-scatter(%x), replica_groups={{0,1,2,3}}": {"reduce-scatter": 48},
        "  %a = f32[8]{0} add(%all-reduce.1, %y)": {},
    }
    for line, want in lines.items():
        assert collective_bytes(line) == want, line
