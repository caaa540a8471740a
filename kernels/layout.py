"""The kernels' arguments, field by field as the .cu files declare them, and how a geometry becomes offsets and strides.

`addressing.cuh` computes every address from these. The tests compare the sizes with the compiler's.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.dtypes import item_bytes
from kvstore.errors import GeometryError, InvalidArgument
from kvstore.geometry import Geometry

PARTS = 2  # keys and values: as addressing.cuh has it
ARENAS = 8  # that one block table may point into: three bits of an entry
ARENA_SHIFT = 29  # bits of an entry that name the slot's unit: 2 TiB an arena
MAX_COUNT = 2**31 - 1  # blocks, tokens, vectors of one launch: the kernels count in 32 bits

Address = ctypes.c_uint64


class Divisor(ctypes.Structure):
    """Division by a fixed number through a multiplication; see `divisor`."""

    _fields_ = [("divisor", ctypes.c_uint32), ("magic", ctypes.c_uint32), ("shift", ctypes.c_uint32)]


def divisor(number: int) -> Divisor:
    """What `divide` in addressing.cuh needs to divide any n < 2^31 by `number`: ((n * magic >> 32) + n) >> shift."""
    if not 1 <= number <= MAX_COUNT:
        raise InvalidArgument(f"the kernels cannot divide by {number}; counts are 1 to {MAX_COUNT}")
    shift = (number - 1).bit_length()
    return Divisor(number, (2**32 * (2**shift - number)) // number + 1, shift)


class RowStrides(ctypes.Structure):
    """Bytes from a block's start to the first row of each part, and from one head, one token, to the next."""

    _fields_ = [
        ("part", ctypes.c_int64 * PARTS),
        ("head_stride", ctypes.c_int64 * PARTS),
        ("token_stride", ctypes.c_int64 * PARTS),
    ]


class Slots(ctypes.Structure):
    """Arenas, and where rows lie in a slot."""

    _fields_ = [("arena", Address * ARENAS), ("layer_stride", ctypes.c_int64), ("rows", RowStrides)]


class Side(ctypes.Structure):
    """One side of a copy: slots, or an engine's tensors where `bases` is not 0."""

    _fields_ = [("slots", Slots), ("bases", Address), ("block_stride", ctypes.c_int64)]


class DecodeArgs(ctypes.Structure):
    """The arguments of paged_decode.cu."""

    _fields_ = [
        ("slots", Slots),
        ("q", Address),
        ("out", Address),
        ("q_stride", ctypes.c_int64 * 2),
        ("out_stride", ctypes.c_int64 * 2),
        ("table", Address),
        ("context", Address),
        ("sink_logits", Address),
        ("partial", Address),
        ("partial_top", Address),
        ("partial_sum", Address),
        ("block_tokens", Divisor),
        ("table_stride", ctypes.c_int32),
        ("layer", ctypes.c_int32),
        ("q_heads", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("splits", ctypes.c_int32),
        ("split_tokens", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("sink_tokens", ctypes.c_int32),
        ("scale_log2", ctypes.c_float),
    ]


class CopyArgs(ctypes.Structure):
    """The arguments of block_copy.cu; `source` and `target` are its `from` and `to`."""

    _fields_ = [
        ("source", Side),
        ("target", Side),
        ("source_blocks", Address),
        ("target_blocks", Address),
        ("layers", ctypes.c_int32),
        ("pieces", ctypes.c_int32),
        ("row_vectors", Divisor),
        ("tokens", Divisor),
        ("heads", Divisor),
        ("vectors", ctypes.c_uint32),
    ]


class WriteArgs(ctypes.Structure):
    """The arguments of kv_write.cu."""

    _fields_ = [
        ("slots", Slots),
        ("source", Address * PARTS),
        ("token_stride", ctypes.c_int64 * PARTS),
        ("head_stride", ctypes.c_int64 * PARTS),
        ("starts", Address),
        ("context", Address),
        ("table", Address),
        ("block_tokens", Divisor),
        ("table_stride", ctypes.c_int32),
        ("layer", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("row_vectors", ctypes.c_int32 * PARTS),
    ]


@dataclass(frozen=True)
class Nest:
    """The rows of one layer of a block: so many parts, heads, tokens, and bytes a row."""

    parts: int
    heads: int
    tokens: int
    row_bytes: int


@dataclass(frozen=True)
class SlotSpace:
    """Slots of one geometry in up to ARENAS arenas, given by the addresses where this device sees them.

    Raises InvalidArgument for too many arenas, or one that does not start on 16 bytes.
    """

    geometry: Geometry
    arenas: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.arenas) <= ARENAS:
            raise InvalidArgument(f"{len(self.arenas)} arenas; a block table can point into 1 to {ARENAS}")
        for base in self.arenas:
            if base <= 0 or base % 16:
                raise InvalidArgument(f"an arena at address {base:#x} does not start on 16 bytes; give the mapping's own start")

    def nest(self) -> Nest:
        """What one layer of a block holds. Raises GeometryError where keys and values differ in size, or scales would be left out."""
        geometry = self.geometry
        if geometry.format != "kv1":
            page = self._page_bytes()
            return Nest(1, 1, 1, page)
        if geometry.quant is not None:
            raise GeometryError("blocks with scales are copied from slot to slot only; use copy_slots")
        width = item_bytes(geometry.dtype)
        if geometry.kind == "mla":
            return Nest(1, 1, geometry.block_tokens, geometry.tensor_views()[0]["kv"].shape[-1] * width)
        if geometry.key_dim != geometry.value_dim:
            raise GeometryError(f"keys of {geometry.key_dim} and values of {geometry.value_dim}: the copy kernel needs rows of one size")
        return Nest(2, geometry.kv_heads, geometry.block_tokens, geometry.tensor_views()[0]["k"].shape[-1] * width)

    def slots(self) -> Slots:
        """The kernels' view of these slots."""
        geometry, found = self.geometry, self.bare()
        if geometry.format != "kv1":
            found.layer_stride = self._page_bytes()
            return found
        layers = geometry.tensor_views()
        names = ("kv",) if geometry.kind == "mla" else ("k", "v")
        for part, name in enumerate(names):
            view = layers[0][name]
            found.rows.part[part] = view.offset_bytes
            found.rows.token_stride[part] = view.strides_bytes[-2]
            found.rows.head_stride[part] = view.strides_bytes[0] if len(view.shape) == 3 else 0
        if len(layers) > 1:
            found.layer_stride = layers[1][names[0]].offset_bytes - layers[0][names[0]].offset_bytes
        return found

    def bare(self) -> Slots:
        """The same arenas with one row a block that starts where the slot does."""
        found = Slots()
        for index, base in enumerate(self.arenas):
            found.arena[index] = base
        return found

    def _page_bytes(self) -> int:
        pages, rest = divmod(self.geometry.opaque_block_bytes, self.geometry.layers)
        if rest:
            raise GeometryError(
                f"an opaque block of {self.geometry.opaque_block_bytes} bytes is no whole number for each of {self.geometry.layers} layers"
            )
        return pages


def table_entries(units: Sequence[int] | NDArray[np.integer[Any]], arena: int = 0) -> NDArray[np.uint32]:
    """Block-table entries for slots at `units` (offsets in 4 KiB) of one arena, counted from 0.

    Raises InvalidArgument for an arena that no entry can name, or a slot past 2 TiB.
    """
    found = np.asarray(units, np.int64)
    if not 0 <= arena < ARENAS:
        raise InvalidArgument(f"arena {arena}; a block table can point into 0 to {ARENAS - 1}")
    if found.size and (found.min() < 0 or found.max() >> ARENA_SHIFT):
        raise InvalidArgument(f"a slot at unit {found.max()}; an entry can name units 0 to {2**ARENA_SHIFT - 1}")
    return (found | arena << ARENA_SHIFT).astype(np.uint32)
