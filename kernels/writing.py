"""`write_kv`: the keys and values of new tokens into their sequences' slots."""

from __future__ import annotations

import math
from typing import Any

from kvstore.dtypes import item_bytes
from kvstore.errors import GeometryError, InvalidArgument
from kvstore.kernels.arrays import describe, require_place
from kvstore.kernels.backend import Backend
from kvstore.kernels.layout import MAX_COUNT, SlotSpace, WriteArgs, divisor
from kvstore.kernels.variants import write_variant


def write_kv(backend: Backend, keys: Any, values: Any, slots: SlotSpace, table: Any, starts: Any, context: Any, *, layer: int) -> None:
    """Write the new keys and values of one step, for one layer. Sequences may have any number of new tokens, or none.

    keys, values   [tokens, kv_heads, dim] in the slots' dtype, after their rotation; the sequences' new tokens one after the other
    starts         [batch + 1] int32: where each sequence's tokens begin, and the end of the last; tokens past it are left out
    context        [batch] int32: tokens of each sequence, the new ones included: they go to its last positions; 0 for a padded row
    table          [batch, blocks] uint32: entries of `table_entries`
    All arrays lie on the backend's device. Raises GeometryError for slots without keys and values per head, InvalidArgument for others.
    """
    geometry = slots.geometry
    if geometry.format != "kv1" or geometry.kind != "mha" or geometry.quant:
        raise GeometryError("new tokens are written to kv1 blocks with keys and values per head and without scales")
    if not 0 <= layer < geometry.layers:
        raise InvalidArgument(f"layer {layer} of {geometry.layers}; count from 0")
    size, dims = item_bytes(geometry.dtype), (geometry.key_dim, geometry.value_dim)
    parts = [describe(keys, geometry.dtype), describe(values, geometry.dtype)]
    tokens = parts[0].shape[0] if parts[0].shape else 0
    for name, part, dim in zip(("keys", "values"), parts, dims, strict=True):
        part.require(name, geometry.dtype, tokens, geometry.kv_heads, dim).require_dense(name)
    lengths = describe(context).require("context", "int32", None).require_dense("context")
    batch = lengths.shape[0]
    begins = describe(starts).require("starts", "int32", batch + 1).require_dense("starts")
    entries = describe(table).require("table", "uint32", batch, None).require_dense("table")
    require_place(backend.on_device, [*parts, lengths, begins, entries])
    if tokens > MAX_COUNT:
        raise InvalidArgument(f"{tokens} new tokens; one launch takes {MAX_COUNT}")
    if tokens == 0 or batch == 0:
        return
    args = WriteArgs(slots=slots.slots(), starts=begins.address, context=lengths.address, table=entries.address)
    alignment = [16, *slots.arenas, args.slots.layer_stride]
    for place, part in enumerate(parts):
        args.source[place] = part.address
        args.token_stride[place], args.head_stride[place] = part.strides_bytes[0], part.strides_bytes[1]
        rows = args.slots.rows
        alignment += [part.address, *part.strides_bytes[:2], dims[place] * size]
        alignment += [rows.part[place], rows.head_stride[place], rows.token_stride[place]]
    vector = math.gcd(*alignment)
    for place, dim in enumerate(dims):
        args.row_vectors[place] = dim * size // vector
    args.block_tokens, args.table_stride = divisor(geometry.block_tokens), entries.strides_bytes[0] // 4
    args.layer, args.batch, args.heads = layer, batch, geometry.kv_heads
    backend.launch(write_variant(vector), (tokens, 1, 1), 0, args)
