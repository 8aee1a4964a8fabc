"""PartitionSpecs of quantized weights: consistent with those of the float weights, block by block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mxjax
from mxjax import sharding
from mxjax.errors import BlockShapeError, ConfigError
from mxjax.ops.specs import weight_specs
from mxjax.transforms import BlockMatrix, Chain, ChannelScale, Hadamard, Kronecker


def mesh_of(shape=(4, 2), names=("a", "b")):
    assert len(jax.devices()) >= 8, "tests/conftest.py asks XLA for eight"
    kinds = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=jax.devices()[: int(np.prod(shape))])


def weight(shape=(256, 8), transform=None, **rule):
    cfg = mxjax.QuantConfig(rules=[mxjax.Rule(transform=transform, **rule)])
    w = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.eval_shape(lambda w: mxjax.quantize({"kernel": w}, cfg)["kernel"], w)  # shapes are all that specs need


def test_codes_and_scales_follow_the_float_axes():
    w = weight_specs(P("a", "b"), weight(weight="nvfp4"))  # [K, N] is stored [N, K]
    assert (w.qtensor.codes, w.qtensor.scales, w.qtensor.global_scale) == (P("b", "a"), P("b", "a"), P())
    w = weight_specs(P("a", "b"), weight((8, 256), axis=-1, weight="nvfp4"))  # [N, K] stays
    assert (w.qtensor.codes, w.qtensor.scales) == (P("a", "b"), P("a", "b"))
    w = weight_specs(P("a", None, "b"), weight((4, 64, 8), weight="nvfp4"))  # experts have a tensor scale each
    assert (w.qtensor.codes, w.qtensor.global_scale) == (P("a", "b", None), P("a"))
    w = weight_specs(P("a"), weight((64, 4, 8), axis=-3))  # attention: embed, heads, head_dim
    assert w.qtensor.codes == P(None, None, "a")
    assert weight_specs(None, weight()).qtensor.codes == P(None, None)
    assert weight_specs(P(("a", "b")), weight(weight="nvfp4").qtensor).codes == P(None, ("a", "b"))


def test_branches_and_transforms_lie_where_the_contraction_axis_lies():
    w = weight_specs(P("a", "b"), weight(algorithm="loraq", options={"steps": 1, "iterations": 1}))
    assert (w.branch.a.codes, w.branch.a.scales) == (P(None, "a"), P(None, "a"))
    assert (w.branch.b.codes, w.branch.b.scales) == (P("b", None), P("b", None))

    def of(transform):
        return weight_specs(P("a", "b"), weight(transform=transform), mesh=mesh_of()).transform

    assert of(Hadamard(32)) == Hadamard(32)
    assert of(ChannelScale(jnp.ones(256), jnp.float32(1))) == ChannelScale(P("a"), P())
    assert of(BlockMatrix(jnp.stack([jnp.eye(32)] * 8), jnp.float32(1))) == BlockMatrix(P("a"), P())
    chain = Chain((ChannelScale(jnp.ones(256)), Hadamard(32)))
    assert of(chain) == Chain((ChannelScale(P("a")), Hadamard(32)))
    one, eight = jnp.eye(4)[None], jnp.stack([jnp.eye(8)] * 8)
    assert of(Kronecker(one, eight)) == Kronecker(P(), P("a"))
    assert of(Kronecker(one, eight[:1], jnp.ones((8, 4)), jnp.ones((8, 8)))) == Kronecker(P(), P(), P("a"), P("a"))
    with pytest.raises(BlockShapeError, match="no multiple of 128"):  # two factors, each for half of K: four shards
        of(Kronecker(one, eight[:2]))


def test_a_block_never_crosses_a_shard():
    mesh = mesh_of()
    with pytest.raises(BlockShapeError, match=r"up/kernel: axis -2 of shape \(96, 8\).*4 shards by \('a',\).*'b': 2"):
        weight_specs(P("a"), weight((96, 8)), mesh=mesh, path="up/kernel")
    with pytest.raises(BlockShapeError, match="hadamard 128"):
        weight_specs(P("a"), weight((256, 8), transform=Hadamard(128)), mesh=mesh)
    with pytest.raises(BlockShapeError, match="mxfp8_e4m3 inputs"):  # 16 divides 80, 32 does not
        weight_specs(P("b"), weight((160, 8), weight="nvfp4", activation="mxfp8_e4m3"), mesh=mesh)

    def resharded(spec, shape):
        return weight_specs(spec, weight(shape), mesh=mesh, on_uneven="reshard").qtensor.codes

    assert resharded(P("a"), (96, 8)) == P("a", None)  # to the outputs
    assert resharded(P("a"), (96, 6)) == P(None, None)  # which it does not divide
    assert resharded(P("a", "b"), (96, 8)) == P(("b", "a"), None)
    assert resharded(P(("b", "a")), (64, 8)) == P("a", "b")  # two of the eight shards remain
    assert resharded(P("a"), (128, 6)) == P(None, "a")  # nothing to do


@pytest.mark.parametrize("quantized", [False, True])
def test_what_a_mesh_does_not_cut_evenly(quantized):
    """JAX has shards of one size only; the error says where, before JAX's says what."""
    mesh = mesh_of((3,), ("c",))
    tree = {"up": {"kernel": jnp.ones((96, 8)), "bias": jnp.ones(8)}}
    tree = mxjax.quantize(tree, "mxfp4") if quantized else tree
    for name, spec, axis in [("kernel", P(None, "c"), r"1 of shape \(96, 8\)"), ("bias", P("c"), r"0 of shape \(8,\)")]:
        rules = {"up": {"kernel": None, "bias": None} | {name: spec}}
        match = rf"up/{name}: axis {axis} is not cut evenly into 3 shards by \('c',\) of the mesh .*whole \(None\)"
        for f in (lambda r: sharding.shard(tree, mesh, r), lambda r: sharding.specs(r, "mxfp4", tree, mesh=mesh)):
            with pytest.raises(BlockShapeError, match=match):
                f(rules)
    with pytest.raises(ConfigError, match=r"up/kernel: .* cuts two axes by one mesh axis"):
        sharding.specs({"up": {"kernel": P("c", "c"), "bias": None}}, "mxfp4", {"up": {
            "kernel": jnp.ones((96, 9)), "bias": jnp.ones(9)}}, mesh=mesh)  # fmt: skip
    # Without a tree there are no sizes to look at, only names.
    bare = sharding.specs({"up": {"kernel": P("c", None)}}, "mxfp4", mesh=mesh)
    assert bare["up"]["kernel"].qtensor.codes == P(None, "c")
    with pytest.raises(ConfigError, match="none named 'z'"):
        sharding.specs({"up": {"kernel": P("z", None)}}, "mxfp4", mesh=mesh)


def test_specs_of_trees():
    mesh = mesh_of()
    params = {"up": {"kernel": jnp.ones((128, 8)), "bias": jnp.ones(8)}, "norm": {"scale": jnp.ones(128)}}
    rules = {"up": {"kernel": P("a", "b"), "bias": P("b")}, "norm": None}
    out = sharding.specs(rules, "nvfp4", params, mesh=mesh)
    assert out["up"]["kernel"].qtensor.codes == P("b", "a")
    assert out["up"]["bias"] == P("b") and out["norm"]["scale"] == P()
    quantized = jax.eval_shape(lambda p: mxjax.quantize(p, "nvfp4"), params)
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    assert jax.tree.structure(out, is_leaf=is_spec) == jax.tree.structure(quantized)
    assert out == sharding.specs(rules, tree=quantized, mesh=mesh)  # the quantized tree says all that cfg does
    by_path = {"up/kernel": P("a", "b"), "up/bias": P("b")}
    assert out == sharding.specs(by_path.get, "nvfp4", params)
    placed = sharding.shard(params, mesh, rules)
    assert out == sharding.specs(placed, "nvfp4")
    bare = sharding.specs({"up": rules["up"]}, "nvfp4")
    assert bare["up"]["kernel"].qtensor.scales == P("b", "a") and bare["up"]["kernel"].qtensor.size == 0

    with pytest.raises(ConfigError, match="structure of the tree"):
        sharding.specs({"up": {"kernel": P("a")}}, "nvfp4", params)
    with pytest.raises(ConfigError, match="none named 'model'"):
        sharding.specs(P("model"), "nvfp4", params, mesh=mesh)
    with pytest.raises(ConfigError, match=r"up/bias: .* has 2 entries for 1 axes"):
        sharding.specs(P("a", "b"), "nvfp4", {"up": {"bias": jnp.ones(8), "kernel": jnp.ones((64, 8))}})
    with pytest.raises(ConfigError, match="depends on data"):
        sharding.specs(P(), "wush_mxfp4", {"kernel": jnp.ones((64, 8))})


def test_shard_puts_quantized_trees_where_their_float_weights_would_be():
    mesh = mesh_of()
    w = mxjax.quantize({"kernel": jax.random.normal(jax.random.key(0), (128, 8))}, "nvfp4")["kernel"]
    tree = {"kernel": w, "bias": np.arange(8.0, dtype=np.float32)}
    out = sharding.shard(tree, mesh, {"kernel": P("a", "b"), "bias": P("b")})
    assert out["kernel"].qtensor.codes.sharding == NamedSharding(mesh, P("b", "a"))
    assert out["bias"].sharding == NamedSharding(mesh, P("b"))
    for got, want in zip(jax.tree.leaves(out), jax.tree.leaves(tree), strict=True):
        assert np.array_equal(got, want)
    again = sharding.shard(tree, mesh, sharding.specs({"kernel": P("a", "b"), "bias": P("b")}, tree=tree))
    assert jax.tree.map(lambda x: x.sharding, again) == jax.tree.map(lambda x: x.sharding, out)
    inside = jax.jit(lambda t: sharding.constrain(t, {"kernel": P("a", "b"), "bias": P("b")}, mesh=mesh))(tree)
    assert inside["kernel"].qtensor.scales.sharding.is_equivalent_to(NamedSharding(mesh, P("b", "a")), 2)


def test_shard_reads_slices_only():
    """Each device's slice is asked for on its own: nothing touches the whole of a memory map."""
    seen = []

    class Map(np.ndarray):
        def __getitem__(self, index):
            out = super().__getitem__(index)
            seen.append(out.shape)
            return out

    x = np.zeros((64, 8), np.float32).view(Map)
    sharding.shard({"x": x}, mesh_of(), P("a", "b"))
    assert set(seen) == {(16, 4)}
