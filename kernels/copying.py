"""`copy_blocks`: blocks between an engine's paged tensors and slots, either way; `copy_slots`: from slot to slot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.errors import GeometryError, InvalidArgument
from kvstore.geometry import UNIT_BYTES
from kvstore.kernels.arrays import Array, describe, require_place, width
from kvstore.kernels.backend import Backend
from kvstore.kernels.layout import MAX_COUNT, PARTS, CopyArgs, Nest, RowStrides, Side, SlotSpace, divisor
from kvstore.kernels.variants import THREADS, copy_variant

PIECE_VECTORS = 4 * THREADS["block_copy"]  # vectors that a thread block copies in one round
AXES = "kbhtd"  # of an engine's tensors: keys and values, block, head, token, dim


@dataclass(frozen=True)
class EngineTensors:
    """An engine's paged KV, one or two tensors a layer; made by `engine_tensors`. It keeps the tensors alive."""

    nest: Nest
    layers: int
    blocks: int
    rows: RowStrides
    block_stride: int
    addresses: tuple[int, ...]
    bases: Any
    arrays: tuple[Array, ...]

    def side(self) -> Side:
        """The kernel's view of it."""
        side = Side(bases=describe(self.bases).address, block_stride=self.block_stride)
        side.slots.rows = self.rows
        return side


def engine_tensors(backend: Backend, layers: Sequence[Any], axes: str, dtype: str = "") -> EngineTensors:
    """An engine's paged tensors, by the meaning of their axes: "kbthd", "bthd", "bhtd", "bkhtd", …; d, the last one, is contiguous.

    layers   one array a layer with an axis "k" of two (keys, values); or without it a pair (keys, values) a layer; or one array
             without "k" where keys and values are one (MLA: "btd") or bytes ("bd")
    dtype    what the elements are, where the arrays themselves do not say it
    All layers have one shape and one set of strides. Raises InvalidArgument where they have not, GeometryError for axes unknown.
    """
    if len(set(axes)) != len(axes) or not set(axes) <= set(AXES) or "b" not in axes or not axes.endswith("d"):
        raise GeometryError(f"axes {axes!r} are not understood: use each of {', '.join(AXES)} once at most, with b, and d as the last")
    views = [_parts(layer, axes, dtype) for layer in layers]
    if not views:
        raise InvalidArgument("no layers; give at least one tensor")
    names = axes.replace("k", "")
    first = views[0]
    for layer, parts in enumerate(views):
        if [_shape(part) for part in parts] != [_shape(part) for part in first]:
            raise InvalidArgument(f"layer {layer} has other shapes or strides than layer 0; copy such layers apart")
    sizes = dict(zip(names, first[0].shape, strict=True))
    rows, strides = RowStrides(), [dict(zip(names, part.strides_bytes, strict=True)) for part in first]
    for place, (part, steps) in enumerate(zip(first, strides, strict=True)):
        part.require_dense("a layer's tensor")
        if part.shape != first[0].shape or steps["b"] != strides[0]["b"]:
            raise InvalidArgument("keys and values differ in shape or in the distance of their blocks; copy them apart")
        rows.head_stride[place], rows.token_stride[place] = steps.get("h", 0), steps.get("t", 0)
    nest = Nest(len(first), sizes.get("h", 1), sizes.get("t", 1), sizes["d"] * width(first[0].dtype))
    arrays = tuple(part for parts in views for part in parts)
    require_place(backend.on_device, arrays)
    bases = np.zeros((len(views), PARTS), np.int64)
    for layer, parts in enumerate(views):
        bases[layer, : len(parts)] = [part.address for part in parts]
    addresses = tuple(part.address for part in arrays)
    return EngineTensors(nest, len(views), sizes["b"], rows, strides[0]["b"], addresses, backend.upload(bases), arrays)


def copy_blocks(
    backend: Backend, source: SlotSpace | EngineTensors, target: SlotSpace | EngineTensors, source_blocks: Any, target_blocks: Any
) -> None:
    """Copy blocks, all layers of all of them in one launch: the i-th of `source_blocks` to the i-th of `target_blocks`.

    source_blocks, target_blocks   [blocks] uint32: entries of `table_entries` for slots, block numbers for an engine's tensors
    They lie on the backend's device and are not checked; no block may be read and written in one call.
    Raises GeometryError where the two sides hold blocks of different shape.
    """
    nest = source.nest if isinstance(source, EngineTensors) else source.nest()
    other = target.nest if isinstance(target, EngineTensors) else target.nest()
    layers = [side.layers if isinstance(side, EngineTensors) else side.geometry.layers for side in (source, target)]
    if nest != other or layers[0] != layers[1]:
        raise GeometryError(f"blocks of {layers[0]} layers of {nest} cannot be copied to blocks of {layers[1]} layers of {other}")
    _launch(backend, (_side(source), _side(target)), nest, layers[0], (source, target), (source_blocks, target_blocks))


def copy_slots(backend: Backend, slots: SlotSpace, source_blocks: Any, target_blocks: Any, tokens: int | None = None) -> None:
    """Copy blocks of one geometry from slot to slot: all their bytes, scales included; or only the first `tokens` of each block.

    source_blocks, target_blocks   [blocks] uint32 entries of `table_entries`, on the backend's device
    This is the copy in copy-on-write: a sequence that goes on from a shared block's first tokens writes to a slot of its own.
    """
    geometry = slots.geometry
    if tokens is None:
        whole = Side(slots=slots.bare())
        _launch(backend, (whole, whole), Nest(1, 1, 1, geometry.block_bytes), 1, (slots, slots), (source_blocks, target_blocks))
        return
    if not 0 <= tokens <= geometry.block_tokens or geometry.format != "kv1":
        raise InvalidArgument(f"the first {tokens} tokens of a block of {geometry.block_tokens}, {geometry.format}; give fewer, of kv1")
    nest = slots.nest()
    nest = Nest(nest.parts, nest.heads, tokens, nest.row_bytes)
    _launch(backend, (_side(slots), _side(slots)), nest, geometry.layers, (slots, slots), (source_blocks, target_blocks))


def copy_pieces(backend: Backend, slots: SlotSpace, piece: tuple[int, int], source_blocks: Any, target_blocks: Any) -> None:
    """Copy the same bytes of blocks from slot to slot: of each `piece` = (first byte, bytes), which begins on 16 bytes.

    source_blocks, target_blocks   [blocks] uint32 entries of `table_entries`, on the backend's device
    A layer of all blocks that come up from host memory is one launch: one of the arenas is the host's, where the device can read it.
    """
    first, size_bytes = piece
    if not 0 <= first < first + size_bytes <= slots.geometry.block_bytes:
        raise InvalidArgument(f"bytes {first} to {first + size_bytes} of a block of {slots.geometry.block_bytes}")
    if first % 16:
        raise InvalidArgument(f"a piece of a block that begins at byte {first}; begin it at a multiple of 16")
    moved = SlotSpace(slots.geometry, tuple(base + first for base in slots.arenas))
    side = Side(slots=moved.bare())
    _launch(backend, (side, side), Nest(1, 1, 1, size_bytes), 1, (moved, moved), (source_blocks, target_blocks))


def _parts(layer: Any, axes: str, dtype: str) -> list[Array]:
    """Keys and values of one layer, each without the axis "k"."""
    if isinstance(layer, (tuple, list)):
        if len(layer) != PARTS or "k" in axes:
            raise InvalidArgument(f"a layer of {len(layer)} tensors with axes {axes!r}; give a pair, or one tensor with an axis k")
        return [_with_axes(describe(part, dtype), axes) for part in layer]
    whole = _with_axes(describe(layer, dtype), axes)
    if "k" not in axes:
        return [whole]
    at = axes.index("k")
    if whole.shape[at] != PARTS:
        raise InvalidArgument(f"axis k of {list(whole.shape)} has {whole.shape[at]} places; keys and values are 2")
    shape, strides = whole.shape[:at] + whole.shape[at + 1 :], whole.strides_bytes[:at] + whole.strides_bytes[at + 1 :]
    starts = [whole.address + part * whole.strides_bytes[at] for part in range(PARTS)]
    return [Array(start, shape, strides, whole.dtype, whole.on_device, whole.owner) for start in starts]


def _shape(part: Array) -> tuple[object, ...]:
    return part.shape, part.strides_bytes, part.dtype


def _with_axes(array: Array, axes: str) -> Array:
    if len(array.shape) != len(axes):
        raise InvalidArgument(f"a tensor {list(array.shape)} has not the axes {axes!r}")
    return array


def _side(which: SlotSpace | EngineTensors) -> Side:
    return which.side() if isinstance(which, EngineTensors) else Side(slots=which.slots())


def _merged(nest: Nest, rows: Sequence[RowStrides]) -> Nest:
    """The same bytes with fewer, longer rows, where tokens, then heads, follow each other without a gap on both sides."""
    steps = [(side.token_stride[part], side.head_stride[part]) for side in rows for part in range(nest.parts)]
    if nest.tokens > 1 and any(token != nest.row_bytes for token, _ in steps):
        return nest
    row_bytes = nest.row_bytes * nest.tokens
    if nest.heads > 1 and any(head != row_bytes for _, head in steps):
        return Nest(nest.parts, nest.heads, 1, row_bytes)
    return Nest(nest.parts, 1, 1, row_bytes * nest.heads)


def _launch(
    backend: Backend,
    sides: tuple[Side, Side],
    nest: Nest,
    layers: int,
    owners: tuple[SlotSpace | EngineTensors, SlotSpace | EngineTensors],
    blocks: tuple[Any, Any],
) -> None:
    sources = describe(blocks[0]).require("source_blocks", "uint32", None).require_dense("source_blocks")
    targets = describe(blocks[1]).require("target_blocks", "uint32", *sources.shape).require_dense("target_blocks")
    require_place(backend.on_device, [sources, targets])
    nest = _merged(nest, [side.slots.rows for side in sides])
    alignment = [16, nest.row_bytes, UNIT_BYTES]
    for side, owner in zip(sides, owners, strict=True):
        rows = side.slots.rows
        alignment += [side.slots.layer_stride, side.block_stride]
        alignment += list(owner.addresses if isinstance(owner, EngineTensors) else owner.arenas)
        for part in range(nest.parts):
            alignment += [rows.part[part], rows.head_stride[part] * (nest.heads > 1), rows.token_stride[part] * (nest.tokens > 1)]
    vector = math.gcd(*alignment)
    vectors = nest.parts * nest.heads * nest.tokens * (nest.row_bytes // vector)
    pieces = -(-vectors // PIECE_VECTORS)
    count = sources.shape[0]
    if vectors == 0 or count == 0:
        return
    if max(vectors, pieces * layers * count) > MAX_COUNT:
        raise InvalidArgument(f"{count} blocks of {layers} layers of {nest} are too much for one launch; copy fewer at once")
    args = CopyArgs(source=sides[0], target=sides[1], source_blocks=sources.address, target_blocks=targets.address)
    args.layers, args.pieces, args.vectors = layers, pieces, vectors
    args.row_vectors, args.tokens, args.heads = divisor(nest.row_bytes // vector), divisor(nest.tokens), divisor(nest.heads)
    backend.launch(copy_variant(vector), (pieces * layers * count, 1, 1), 0, args)
