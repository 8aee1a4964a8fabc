"""Rounding the columns of a weight one after the other with error feedback: the inner loop of GPTQ."""

from pallas_kernels.round_columns.api import round_columns as round_columns
