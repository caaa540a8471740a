"""Values as a replay's story has them."""

from __future__ import annotations

import numpy as np


def short(value: object) -> str:
    """A value on one line, hashes cut to what tells them apart."""
    if isinstance(value, bytes):
        return value.hex()[:12]
    if isinstance(value, np.ndarray):
        if value.ndim == 2 and value.shape[1] == 4 and value.dtype == np.uint64:
            return "[" + " ".join(hash_.tobytes().hex()[:12] for hash_ in value) + "]"
        return str(value.tolist())
    if hasattr(value, "__dataclass_fields__"):
        inside = ", ".join(f"{name}={short(getattr(value, name))}" for name in value.__dataclass_fields__)
        return f"{type(value).__name__}({inside})"
    return str(value)
