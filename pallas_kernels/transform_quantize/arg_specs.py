"""Argument shapes that the benchmark and tuning share."""

from __future__ import annotations

# K of real layers (Llama-3.1-8B, Qwen3-32B, FLUX.1), and row counts from decode to prefill.
BENCH_K = (3072, 4096, 8192, 12288, 14336)
BENCH_M = (16, 128, 1024, 4096)
