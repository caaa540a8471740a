"""Takes the first tokens of a stored block over into a block of one's own: what a partial tail is for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvstore.clients.blocks import Tail, require_tails
from kvstore.errors import InvalidArgument
from kvstore.geometry import UNIT_BYTES, Geometry

Bytes = NDArray[np.uint8]


def copy_tail(geometry: Geometry, arena: Bytes, tail: Tail, target: Bytes, target_unit: int) -> None:
    """Copy the tail's tokens, all layers, to the same places in the block at `target_unit` of `target`, which may be `arena` again.

    arena, target   whole arenas as bytes; units are 4 KiB from their starts
    The donor is only read; the rest of the target block stays as it is. Raises GeometryError where a block's first tokens are of no use
    without the rest, InvalidArgument for more tokens than a block has and for units outside the arenas.
    """
    require_tails(geometry)
    if not 0 < tail.tokens <= geometry.block_tokens:
        raise InvalidArgument(f"{tail.tokens} tokens of a block of {geometry.block_tokens}; give 1 to all of them")
    donor, own = _slot(geometry, arena, tail.unit), _slot(geometry, target, target_unit)
    for source, copy in zip(_pieces(geometry, donor, tail.tokens), _pieces(geometry, own, tail.tokens), strict=True):
        copy[...] = source


def _slot(geometry: Geometry, arena: Bytes, unit: int) -> Bytes:
    first = unit * UNIT_BYTES
    if unit < 0 or first + geometry.block_bytes > len(arena):
        raise InvalidArgument(f"a block at unit {unit} is not within the arena of {len(arena)} bytes; give a slot of this store")
    return arena[first : first + geometry.block_bytes]


def _pieces(geometry: Geometry, slot: Bytes, tokens: int) -> Iterator[Bytes]:
    """The bytes of the first tokens: one array [layer, head, bytes] for keys, for values, and for each of their scales."""
    layers = geometry.tensor_views()
    for name, view in layers[0].items():
        if name in ("latent", "rope"):  # parts of "kv"
            continue
        axis = len(view.shape) - (1 if name.endswith("_scale") else 2)  # the tokens'
        heads = view.shape[0] if axis else 1
        step = layers[1][name].offset_bytes - view.offset_bytes if len(layers) > 1 else 0
        shape = (len(layers), heads, tokens * view.strides_bytes[axis])
        strides = (step, view.strides_bytes[0] if axis else 0, 1)
        yield as_strided(slot[view.offset_bytes :], shape, strides)
