"""Argument shapes that the benchmark and tuning share."""

from __future__ import annotations

# N x K: Llama-3.1-8B and Qwen3-32B class, FLUX.1.
BENCH_SHAPES = ((8192, 8192), (14336, 4096), (4096, 14336), (4096, 4096), (12288, 3072), (3072, 12288), (3072, 3072))
DECODE_M = (1, 8, 16, 32, 64, 128, 256, 1024)  # W4A16
MIXED_M = (16, 64, 128, 256, 512)  # W4A4
PREFILL_M = (1024, 4096, 8192)
