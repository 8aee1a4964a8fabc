"""Targets, features, the choice of an implementation, and what kernels_used sees."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from mxjax import backend
from mxjax.errors import BackendUnsupported, ConfigError
from pallas_kernels import _dispatch


def pretend(kind, platform="gpu", cores=132):
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform=platform)
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


@pytest.mark.parametrize(
    ("kind", "platform", "arch", "has", "lacks"),
    [
        ("NVIDIA H200", "cuda", "sm_90", "triton ptx mosaic_gpu wgmma fp8_matmul", "fp4_matmul"),
        ("NVIDIA B200", "cuda", "sm_100", "triton ptx mosaic_gpu fp8_matmul fp4_matmul", "wgmma"),
        ("NVIDIA RTX PRO 6000", "cuda", "sm_120", "triton ptx fp8_matmul fp4_matmul", "mosaic_gpu wgmma"),
        ("NVIDIA L40S", "cuda", "sm_89", "triton ptx fp8_matmul", "mosaic_gpu fp4_matmul"),
        ("NVIDIA A100-SXM4-80GB", "cuda", "sm_80", "triton ptx", "fp8_matmul mosaic_gpu"),
        ("NVIDIA A10G", "cuda", "sm_86", "triton ptx", "fp8_matmul"),
        ("gfx942", "rocm", "gfx942", "triton", "ptx mosaic_gpu fp8_matmul fp4_matmul"),
        ("gfx950", "rocm", "gfx950", "triton fp8_matmul fp4_matmul", "ptx mosaic_gpu"),
        ("cpu", "cpu", None, "", "triton ptx mosaic_gpu wgmma fp8_matmul fp4_matmul"),
    ],
)
def test_features_by_device_name(kind, platform, arch, has, lacks):
    with pretend(kind):
        target = backend.target()
        assert (target.platform, target.arch, target.name) == (platform, arch, kind)
        assert [backend.has(f) for f in has.split()] == [True] * len(has.split())
        assert [backend.has(f) for f in lacks.split()] == [False] * len(lacks.split())


def test_the_real_device_answers_outside_a_mesh():
    assert backend.target().platform == {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    with pytest.raises(ConfigError, match="known: triton"):
        backend.has("warp_drive")


def candidates(triton=None, slow=None):
    return [
        _dispatch.Candidate("triton", lambda: "triton", triton, slow),
        _dispatch.Candidate("xla", lambda: "xla"),
    ]


def test_none_takes_the_first_that_can_run_and_is_not_slow():
    assert _dispatch.pick("op", None, candidates()).name == "triton"
    assert _dispatch.pick("op", None, candidates(triton="no GPU")).name == "xla"
    assert _dispatch.pick("op", None, candidates(slow="XLA is faster for M >= 256")).name == "xla"


def test_forced_runs_although_slow_and_says_why_it_cannot():
    assert _dispatch.pick("op", "triton", candidates(slow="slower")).name == "triton"
    with pytest.raises(BackendUnsupported, match=r"op: triton cannot run here: no GPU. What can: xla"):
        _dispatch.pick("op", "triton", candidates(triton="no GPU"))
    with pytest.raises(BackendUnsupported, match="no such implementation"):
        _dispatch.pick("op", "mosaic_gpu", candidates())
    with pytest.raises(ConfigError, match="implementation is None or one of xla"):
        _dispatch.pick("op", "cuda", candidates())


def test_obstacles_name_the_device():
    with pretend("gfx942"):
        assert _dispatch.triton_obstacle(backend.target()) is None
        assert "gfx942" in _dispatch.mosaic_obstacle(backend.target())
    with pretend("NVIDIA B200"):
        assert _dispatch.mosaic_obstacle(backend.target()) is None
        assert "Hopper" in _dispatch.mosaic_obstacle(backend.target(), "wgmma")


def test_kernels_used_of_plain_xla_is_empty():
    assert _dispatch.kernels_used(jax.jit(lambda x: jnp.sin(x) @ x.T), jnp.ones((2, 2))) == ()
