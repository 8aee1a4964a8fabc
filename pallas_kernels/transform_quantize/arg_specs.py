"""Argument shapes that tests, benchmarks and tuning share."""

from __future__ import annotations

# (M, K) that the tests run: odd lengths, no rows, one row, a tail.
TEST_SHAPES = ((1, 576), (3, 768), (33, 2880), (0, 64))
# K of real layers (Llama-3.1-8B, Qwen3-32B, FLUX.1, PixArt) and row counts that the benchmark times.
BENCH_K = (3072, 4096, 8192, 12288, 14336)
BENCH_M = (16, 128, 1024, 4096)
