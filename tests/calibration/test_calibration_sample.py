"""The sample of inputs that statistics keep."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import mxjax
from mxjax.calibration import GramSum, RowSample, update
from mxjax.transforms import Hadamard


def rows_of(n):
    """Row i is [i + 1, 0, 0, 0], so that a sampled row says where it came from."""
    return jnp.zeros((n, 4)).at[:, 0].set(jnp.arange(1.0, n + 1))


def test_which_rows_does_not_depend_on_the_batches():
    x, results = rows_of(300), []
    for cuts in ([300], [1, 99, 200], [64] * 4 + [44]):
        total, start = GramSum.zeros(4, sample=32), 0
        for n in cuts:
            total, start = update(total, x[start : start + n]), start + n
        results.append(np.asarray(total.sample.rows))
    assert all(np.array_equal(r, results[0]) for r in results)
    assert len(set(results[0][:, 0])) == 32 and results[0][:, 0].min() >= 1  # distinct rows of the stream


def test_every_row_is_as_likely():
    taken = np.asarray(RowSample.zeros(4096, 4).add(rows_of(1 << 16), jnp.uint32(0)).rows)[:, 0]
    counts = np.histogram(taken, bins=16, range=(0, 1 << 16))[0]
    # 256 a bin, standard deviation sqrt(256 * 15/16) = 15.5; five of them.
    assert np.abs(counts - 256).max() < 78


def test_fewer_rows_than_places_leave_zeros():
    got = np.asarray(RowSample.zeros(8, 4).add(rows_of(5), jnp.uint32(0)).rows)
    assert sorted(got[:, 0]) == [0, 0, 0, 1, 2, 3, 4, 5]


def test_devices_share_one_sample():
    x = rows_of(256)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))

    def local(x):
        return GramSum.zeros(4, sample=64).add(x).psum("data")

    total = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P()))(x)
    taken = np.asarray(total.sample.rows)[:, 0]
    assert len(set(taken)) == 64 and taken.min() >= 1 and int(total.count) == 256
    assert len(np.unique((taken - 1) // 32)) == 8  # of every device's 32 rows


def test_calibrate_keeps_inputs_and_transforms_move_them():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((20, 32)), jnp.float32)
    stats = mxjax.calibrate(lambda p, x: mxjax.qdot(x, p["kernel"]), {"kernel": jnp.ones((32, 4))}, [x], "mxfp4")
    sample = np.asarray(stats["kernel"].sample)
    assert sample.shape == (512, 32)
    assert {r.tobytes() for r in sample if r.any()} == {r.tobytes() for r in np.asarray(x)}
    turned = stats["kernel"].through(Hadamard(32)).sample
    np.testing.assert_array_equal(turned, Hadamard(32).activation(stats["kernel"].sample))
