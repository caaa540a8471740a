"""The element types that a block may hold, by torch's names. No torch here: only their sizes."""

from kvstore.errors import GeometryError

# Bytes of one stored item, and the values in it.
ITEM_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1, "int8": 1, "uint8": 1,
}  # fmt: skip
VALUES_PER_ITEM: dict[str, int] = {"float4_e2m1fn_x2": 2}


def item_bytes(dtype: str) -> int:
    """Bytes of one stored item of a dtype by torch's name. Raises GeometryError for an unknown name."""
    if dtype not in ITEM_BYTES:
        raise GeometryError(f"dtype {dtype!r} is unknown; use one of {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]
