"""Elements as the kernels store them, and back: numpy has no bfloat16, so all of them travel as raw unsigned integers here."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Raw = NDArray[Any]
Exact = NDArray[np.float64]
RAW: dict[str, Any] = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32}
MANTISSA_BITS = {"float16": 10, "bfloat16": 7}
SMALLEST_EXPONENT = {"float16": -14, "bfloat16": -126}


def encode(values: Exact, dtype: str) -> Raw:
    """Rounded to the dtype, to nearest even."""
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32)
    if dtype == "float32":
        return bits
    return ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def decode(raw: Raw, dtype: str) -> Exact:
    """The numbers that the raw elements mean."""
    if dtype == "float16":
        return raw.view(np.float16).astype(np.float64)
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.view(np.float32).astype(np.float64)


def allowed_error(rows: Exact, dtype: str) -> Exact:
    """What an element of each row may be off by: one unit in the last place at the row's maximum; for float32 1e-5 of it."""
    top: Exact = np.abs(rows).max(axis=-1, keepdims=True)
    if dtype == "float32":
        return 1e-5 * top
    exponent: Exact = np.floor(np.log2(np.maximum(top, 2.0 ** SMALLEST_EXPONENT[dtype])))
    return np.exp2(exponent - MANTISSA_BITS[dtype])
