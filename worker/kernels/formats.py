"""The formats of quantised weights that kernels multiply with."""

from __future__ import annotations

# GGUF's names of the formats → their codes in src/quantised.h, and the channels of a block.
FORMATS = {
    "Q4_0": (0, 32),
    "Q8_0": (1, 32),
    "Q4_K": (2, 256),
    "Q5_K": (3, 256),
    "Q6_K": (4, 256),
    "MXFP4": (5, 32),
    "Q4_1": (6, 32),
    "Q5_0": (7, 32),
    "Q5_1": (8, 32),
    "Q2_K": (9, 256),
    "Q3_K": (10, 256),
    "IQ4_NL": (11, 32),
    "IQ4_XS": (12, 256),
}
