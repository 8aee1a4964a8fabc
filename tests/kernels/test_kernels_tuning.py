"""Tuning files and the benchmark's arithmetic: what is stored is what dispatch reads. No clock here."""

import json

import jax.numpy as jnp
import pytest
from kernel_cases import weight

from mxjax import backend
from mxjax.core.formats import MXFP4
from mxjax.errors import BackendUnsupported, ConfigError
from pallas_kernels import _tuning
from pallas_kernels.bench import candidates, jobs, table
from pallas_kernels.block_scaled_matmul import api, fused_tiles, mosaic_decode, prepare, routes, triton, triton_generic

H200 = backend.Target("cuda", "sm_90", "NVIDIA H200", 132)
B200 = backend.Target("cuda", "sm_100", "NVIDIA B200", 148)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MXJAX_CACHE", str(tmp_path))
    monkeypatch.delenv("MXJAX_TUNINGS", raising=False)
    _tuning._table.cache_clear()
    yield tmp_path
    _tuning._table.cache_clear()


def entry(operation="w4_decode", m=16, n=256, k=512, **config):
    config = config or dict(block_m=32, splits=2, num_warps=8, num_stages=3)
    return dict(operation=operation, m=m, n=n, k=k, config=config, us=1.0, heuristic_us=2.0)


def test_dispatch_reads_what_was_stored(cache):
    q = weight(256, 512)
    w = prepare(q.codes, q.scales, "mxfp4", layout="tiles")
    heuristic = triton.decode_config(8, w, H200.cores)
    assert routes.decode_config(8, w, H200) == heuristic
    _tuning.store(_tuning.user_file(H200.name), H200.name, [entry()])
    tuned = triton.DecodeConfig(block_m=32, splits=2, num_warps=8, num_stages=3)
    assert (cache / "tunings" / "nvidia-h200.json").is_file() and tuned != heuristic
    for m in (1, 8, 16):  # one bucket
        assert routes.decode_config(m, w, H200) == tuned
    assert routes.decode_config(17, w, H200) != tuned and routes.decode_config(16, w, B200) != tuned
    rows = prepare(q.codes, q.scales, "mxfp4", layout="rows")
    config = dict(block_m=16, block_n=128, block_k=64, num_warps=8, num_stages=3)
    _tuning.store(_tuning.user_file(H200.name), H200.name, [entry("matmul_bfloat16_mxfp4", **config)])
    assert api.generic_config(4, rows, jnp.dtype("bfloat16"), False, H200) == triton_generic.GenericConfig(**config)
    assert routes.decode_config(8, w, H200) == tuned, "entries of other kernels stay"
    assert api.generic_config(4, rows, MXFP4, False, H200) == triton_generic.generic_config(4, 256, False)


def test_a_file_of_ones_own_and_packaged_ones(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(_tuning, "PACKAGED", tmp_path / "packaged")
    args = ("w4_decode", triton.DecodeConfig, H200.name, 16, 256, 512)
    _tuning.store(tmp_path / "packaged" / "nvidia-h200.json", H200.name, [entry()])
    assert _tuning.lookup(*args).splits == 2
    monkeypatch.setenv("MXJAX_TUNINGS", str(tmp_path / "mine.json"))
    mine = entry(block_m=16, splits=4, num_warps=4, num_stages=4)
    _tuning.store(_tuning.user_file(H200.name), H200.name, [mine])
    assert _tuning.lookup(*args).splits == 4, "the user's own comes first"


@pytest.mark.parametrize("config", [dict(block_m=16), dict(block_m=16, splits=-1, num_warps=4, num_stages=4), None])
def test_configs_of_other_versions_are_passed_over(cache, config):
    path = _tuning.user_file(H200.name)
    _tuning.store(path, H200.name, [dict(entry(), config=config)])
    assert _tuning.lookup("w4_decode", triton.DecodeConfig, H200.name, 16, 256, 512) is None


@pytest.mark.parametrize("text", ["", "[]", '{"device": "NVIDIA H200"}', '{"device": "x", "entries": [3]}'])
def test_files_that_are_none_are_named(cache, text):
    path = _tuning.user_file(H200.name)
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"nvidia-h200.json is no tuning file"):
        _tuning.lookup("w4_decode", triton.DecodeConfig, H200.name, 16, 256, 512)


def test_another_device_does_not_overwrite(cache):
    _tuning.store(cache / "t.json", H200.name, [entry()])
    with pytest.raises(ConfigError, match="another device"):
        _tuning.store(cache / "t.json", B200.name, [entry()])
    assert json.loads((cache / "t.json").read_text())["device"] == H200.name


def test_packaged_files_are_tuning_files():
    for path in _tuning.PACKAGED.glob("*.json"):
        device = json.loads(path.read_text())["device"]
        assert path.name == _tuning.file_name(device) and _tuning.read(path, device)


@pytest.mark.parametrize("target", [H200, B200])
def test_problems_are_bounded_and_begin_with_the_heuristic(target):
    found = list(candidates.problems([(256, 512)], (1, 16, 100, 300), target))
    assert {p.operation for p in found} == (
        {"w4_rows_8", "w4_rows_16", "w4_fused_bf16", "w4_fused_fp8"}
        if target is H200
        else {"matmul_bfloat16_mxfp4", "matmul_mxfp4_mxfp4_native"}
    )
    for p in found:
        assert 1 < len(p.configs) <= candidates.MOST_CONFIGS and len(set(p.configs)) == len(p.configs)
    heuristic = triton_generic.generic_config(16, 256, False)
    assert target is H200 or found[0].configs[0] == heuristic


@pytest.mark.parametrize(("m", "fp8"), [(32, False), (64, False), (128, True)])
def test_the_most_promising_come_first(m, fp8):
    """By predicted time; both ways to permute bfloat16 x are among them."""
    operation = f"w4_fused_{'fp8' if fp8 else 'bf16'}"
    (problem,) = (p for p in candidates.problems([(8192, 8192)], [m], H200) if p.operation == operation)
    assert problem.configs[0] == fused_tiles.fused_config(m, 8192, 8192, fp8, H200.cores)
    times = [fused_tiles.predicted_time(m, 8192, 8192, fp8, H200.cores, c) for c in problem.configs[1:]]
    assert times == sorted(times)
    assert {c.gather for c in problem.configs} == ({1} if fp8 else {1, 2})


def test_the_model_knows_what_was_measured():
    """Times of both gathers, H200, in microseconds: within 15 %, what the model claims."""
    make, shape = fused_tiles.FusedConfig, ((14336, 4096), (4096, 14336), (8192, 8192))
    for m, (n, k), config, us in (
        (32, shape[0], make(2, 32, 1, 8, 2, 2), 23.79),
        (32, shape[0], make(2, 32, 1, 8, 2, 1), 17.89),
        (32, shape[1], make(4, 32, 8, 4, 1, 2), 17.38),
        (32, shape[1], make(4, 32, 8, 4, 1, 1), 19.33),
        (64, shape[0], make(2, 64, 1, 8, 1, 2), 34.4),
        (64, shape[0], make(2, 64, 1, 8, 2, 1), 21.12),
        (64, shape[1], make(4, 64, 4, 8, 1, 2), 41.74),
        (64, shape[2], make(4, 64, 2, 8, 1, 2), 48.8),
        (64, shape[2], make(2, 64, 2, 8, 2, 1), 23.04),
    ):
        assert abs(fused_tiles.predicted_time(m, n, k, False, 132, config) / us - 1) < 0.15, (m, n, k, config)


def test_eight_rows_and_sixteen_are_tuned_apart(cache):
    for rows, warps in ((8, 8), (16, 12)):
        config = dict(row_tiles=1, warps=warps, depth=2)
        stored = entry(mosaic_decode.operation(rows), n=4096, k=4096, **config)
        _tuning.store(_tuning.user_file(H200.name), H200.name, [stored])
    assert [routes.rows_config(m, 4096, 4096, H200).warps for m in (1, 8, 9, 16)] == [8, 8, 12, 12]


def test_what_is_no_better_than_the_heuristic_is_taken_out(cache):
    path = _tuning.user_file(H200.name)
    _tuning.store(path, H200.name, [entry(), entry(m=32)])
    _tuning.store(path, H200.name, [dict(entry(), config=None)])
    assert _tuning.read(path, H200.name) == [entry(m=32)]
    assert _tuning.lookup("w4_decode", triton.DecodeConfig, H200.name, 16, 256, 512) is None


def test_nothing_to_tune_without_kernels():
    with pytest.raises(BackendUnsupported, match="nothing to tune: Pallas Triton needs"):
        next(candidates.problems([(256, 512)], (16,), backend.Target("cpu", None, "cpu")))


def test_ratios_and_floors():
    times = {
        ("copy", "xla"): dict(us=100.0, bytes=1e8),  # 1000 GB/s
        ("fp8 xla", 8192): dict(us=1000.0, flops=1e12),  # 1000 TFLOP/s
        ("bf16", 64, 64, 1): dict(us=30.0),
        ("bf16 f32", 64, 64, 1): dict(us=20.0),
        ("w4a4", 64, 64, 1): dict(us=10.0, bytes=2e6, flops=8e9, compile_s=3.5),
    }
    table.add_ratios(times)
    (row,) = table.rows(times)
    assert (row["ratio"], row["bf16_us"], row["slow_compile"]) == (2.0, 20.0, True)
    assert row["share_of_floor"] == 0.8, "8 us of operations, which is more than 2 us of bytes"


def test_layer_jobs_are_products_that_keep_their_size():
    for name in ("w4a16", "w4a4"):
        (job,) = jobs.layer_jobs(name, [(64, 128)], [3])
        y = job.fn(*job.args[0])
        assert y.shape == (3, 64) and 0.2 < float(jnp.std(y.astype(jnp.float32))) < 5
