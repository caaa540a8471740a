"""`paged_decode`: one decode step of attention over slots."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

from kvstore.errors import GeometryError, InvalidArgument
from kvstore.kernels.arrays import Array, describe, require_place
from kvstore.kernels.backend import Backend
from kvstore.kernels.layout import MAX_COUNT, DecodeArgs, SlotSpace, divisor
from kvstore.kernels.variants import DECODE_WARPS, GROUPS, Variant, decode_variant, reduce_variant

MAX_GRID = 65_535  # thread blocks along a grid's second and third side: CUDA's limit
GOOD_SHARE = 0.85  # of the device kept busy, relative to the best number of splits: more splits than that takes cost more than they gain
MIN_SPLIT_TOKENS = 256  # tokens of a split: with fewer, writing and reading the partial sums costs as much as it gains
MAX_SPLITS = 128  # splits of one sequence: the second pass reads them one after the other
ROUND_TOKENS = 64  # a split is a multiple of this many tokens: what a thread block reads in one round at most


@dataclass(frozen=True)
class Attention:
    """What a model's attention asks for beyond the softmax.

    scale         the factor of the scores; None takes 1 / sqrt(head dim)
    window        attend to the last so many tokens only, the new one included; 0: to all
    sink_tokens   with a window, the first so many tokens are attended to as well
    """

    scale: float | None = None
    window: int = 0
    sink_tokens: int = 0


@dataclass(frozen=True)
class Splits:
    """How the visible tokens are split: `count` pieces at most, of `tokens` each."""

    count: int
    tokens: int


def choose_splits(blocks: int, visible_tokens: int, at_once: int) -> Splits:
    """The fewest splits that keep the device nearly as busy as any number would, with `blocks` thread blocks for each.

    Thread blocks run in rounds of `at_once`; what a last round leaves idle is lost.

    blocks           sequences × KV heads (× parts of a large group)
    visible_tokens   of the longest sequence
    at_once          thread blocks that run on the device at once: multiprocessors × those that fit on one
    """
    counts = range(1, max(1, min(visible_tokens // MIN_SPLIT_TOKENS, MAX_SPLITS)) + 1)
    rounds = [count * max(blocks, 1) / at_once for count in counts]
    busy = [share / math.ceil(share) for share in rounds]
    count = next(count for count, share in zip(counts, busy, strict=True) if share >= GOOD_SHARE * max(busy))
    tokens = -(-visible_tokens // count)
    tokens = max(ROUND_TOKENS, -(-tokens // ROUND_TOKENS) * ROUND_TOKENS)
    return Splits(max(1, -(-visible_tokens // tokens)), tokens)


def paged_decode(
    backend: Backend,
    q: Any,
    out: Any,
    slots: SlotSpace,
    table: Any,
    context: Any,
    *,
    layer: int,
    max_context: int,
    attention: Attention = Attention(),
    sink_logits: Any = None,
    splits: Splits | None = None,
) -> None:
    """One decode step of attention over paged KV, for one layer; K and V of the new tokens are in their slots already.

    q, out        [batch, q_heads, head_dim] in the slots' dtype; a head's values contiguous. `out` is written
    table         [batch, blocks] uint32: entries of `table_entries`; those past a sequence's context are not read
    context       [batch] int32: tokens to attend to, the new one included; 0 gives zeros (a padded row)
    max_context   at least the largest of `context`: it chooses the splits, and is all that the host needs to know
    sink_logits   [q_heads] float32: a score per head that takes part in the softmax and has no value
    All arrays lie on the backend's device. Raises GeometryError where head counts do not divide or no kernel fits, InvalidArgument
    for other arguments. Online softmax: Milakov & Gimelshein 2018. Split-KV: Flash-Decoding, 2023.
    """
    call = _Call(slots, describe(q, slots.geometry.dtype), describe(out, slots.geometry.dtype), describe(table), describe(context))
    call.check(layer)
    visible = _visible(attention, max_context, call.entries.shape[1] * slots.geometry.block_tokens)
    chosen = splits or choose_splits(call.batch * call.rows, visible, backend.multiprocessors * call.variant.resident)
    if chosen.count < 1 or chosen.tokens < 1 or chosen.count * chosen.tokens < visible:
        raise InvalidArgument(f"{chosen} do not hold the {visible} visible tokens; use choose_splits")
    args = call.arguments(attention, chosen)
    args.layer = layer
    arrays = [call.queries, call.result, call.entries, call.lengths]
    if sink_logits is not None:
        logits = describe(sink_logits).require("sink_logits", "float32", call.q_heads).require_dense("sink_logits")
        args.sink_logits = logits.address
        arrays.append(logits)
    require_place(backend.on_device, arrays)
    if call.batch == 0:
        return
    partial = None
    if chosen.count > 1:
        pieces = call.batch * call.q_heads * chosen.count
        partial = backend.scratch(pieces * (call.dim + 2))
        args.partial = describe(partial).address
        args.partial_top = args.partial + 4 * pieces * call.dim
        args.partial_sum = args.partial_top + 4 * pieces
    shared_bytes = DECODE_WARPS * call.heads_at_once * (call.dim + 2) * ctypes.sizeof(ctypes.c_float)
    backend.launch(call.variant, (chosen.count, call.rows, call.batch), shared_bytes, args)
    if chosen.count > 1:
        backend.launch(reduce_variant(call.dtype, call.dim), (call.q_heads, call.batch, 1), 0, args)
    del partial  # only now: it is freed in stream order, behind both launches


@dataclass(frozen=True)
class _Call:
    """The arrays of one call, and what follows from their shapes."""

    slots: SlotSpace
    queries: Array
    result: Array
    entries: Array
    lengths: Array

    @property
    def batch(self) -> int:
        return self.queries.shape[0]

    @property
    def q_heads(self) -> int:
        return self.queries.shape[1]

    @property
    def dtype(self) -> str:
        return self.slots.geometry.dtype

    @property
    def dim(self) -> int:
        return self.slots.geometry.key_dim

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.q_heads // self.slots.geometry.kv_heads

    @property
    def variant(self) -> Variant:
        """The kernel for it."""
        return decode_variant(self.dtype, self.dim, self.group)

    @property
    def heads_at_once(self) -> int:
        """Query heads that one thread block takes."""
        return min(size for size in GROUPS if size >= min(self.group, GROUPS[-1]))

    @property
    def rows(self) -> int:
        """Thread blocks of one sequence and split."""
        return self.slots.geometry.kv_heads * -(-self.group // self.heads_at_once)

    def check(self, layer: int) -> None:
        geometry = self.slots.geometry
        if geometry.format != "kv1" or geometry.kind != "mha" or geometry.quant or geometry.key_dim != geometry.value_dim:
            raise GeometryError("the decode kernel reads kv1 blocks with keys and values per head, of one size and without scales")
        if not 0 <= layer < geometry.layers:
            raise InvalidArgument(f"layer {layer} of {geometry.layers}; count from 0")
        self.queries.require("q", self.dtype, None, None, self.dim).require_dense("q")
        if self.q_heads < geometry.kv_heads or self.q_heads % geometry.kv_heads:
            raise GeometryError(f"{self.q_heads} query heads over {geometry.kv_heads} KV heads: the second must divide the first")
        _ = self.variant
        self.result.require("out", self.dtype, self.batch, self.q_heads, self.dim).require_dense("out")
        self.entries.require("table", "uint32", self.batch, None).require_dense("table")
        self.lengths.require("context", "int32", self.batch).require_dense("context")
        if self.batch > MAX_GRID or self.rows > MAX_GRID:
            raise InvalidArgument(f"{self.batch} sequences of {self.rows} thread blocks each; one launch takes {MAX_GRID} of either")
        for number in (self.queries.address, *self.queries.strides_bytes[:2]):
            if number % 16:
                raise InvalidArgument("q is read 16 bytes at a time: its start and its strides must be multiples of 16 bytes")

    def arguments(self, attention: Attention, splits: Splits) -> DecodeArgs:
        args = DecodeArgs(slots=self.slots.slots(), q=self.queries.address, out=self.result.address)
        args.table, args.context = self.entries.address, self.lengths.address
        for place in range(2):
            args.q_stride[place], args.out_stride[place] = self.queries.strides_bytes[place], self.result.strides_bytes[place]
        args.block_tokens, args.table_stride = divisor(self.slots.geometry.block_tokens), self.entries.strides_bytes[0] // 4
        args.q_heads, args.group, args.splits, args.split_tokens = self.q_heads, self.group, splits.count, splits.tokens
        args.window, args.sink_tokens = attention.window, attention.sink_tokens
        scale = 1 / math.sqrt(self.dim) if attention.scale is None else attention.scale
        args.scale_log2 = scale * math.log2(math.e)
        return args


def _visible(attention: Attention, max_context: int, table_tokens: int) -> int:
    """Tokens that the longest sequence attends to. Raises InvalidArgument for counts that cannot be."""
    if not 0 <= max_context <= min(table_tokens, MAX_COUNT // 2):
        raise InvalidArgument(f"max_context is {max_context}; the block table holds {table_tokens} tokens a sequence")
    for name, value in (("window", attention.window), ("sink_tokens", attention.sink_tokens)):
        if not 0 <= value <= MAX_COUNT // 2:
            raise InvalidArgument(f"{name} is {value}; give 0 to {MAX_COUNT // 2} tokens")
    if attention.sink_tokens and not attention.window:
        raise InvalidArgument("sink_tokens are what a window keeps besides its own; give a window too, or none of both")
    return min(max_context, attention.window + attention.sink_tokens) if attention.window else max_context
