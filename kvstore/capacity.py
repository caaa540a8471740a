"""The capacity ledger: how much memory keys and values take, by which way of counting. Pure arithmetic; sizes in bytes.

Four accounts are kept apart, since mixing them is how estimates go wrong: *effective* (the tokens that are there), *padded* (every
sequence as long as the longest), *paged* (whole blocks, each physical block once) and *slots* (blocks padded to 4 KiB, as a tier
stores them). Weights, activations and scratch are no part of any.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import GeometryError, InvalidArgument
from kvstore.geometry import Geometry


@dataclass(frozen=True)
class Ledger:
    """What sequences of given lengths need under one geometry. A position is the place of one token."""

    bytes_per_token: int
    block_bytes: int
    effective_positions: int  # tokens stored, those of shared blocks once
    padded_positions: int
    paged_positions: int  # in all physical blocks
    table_entries: int  # blocks as the sequences count them
    blocks: int  # physical ones: a shared block once
    effective_bytes: int
    padded_bytes: int
    paged_bytes: int
    slots_bytes: int

    @property
    def tail_waste_positions(self) -> int:
        """Positions allocated and empty: the unfilled ends of last blocks."""
        return self.paged_positions - self.effective_positions

    @property
    def tail_waste_bytes(self) -> int:
        """The same in bytes of elements."""
        return self.tail_waste_positions * self.bytes_per_token


def ledger(geometry: Geometry, lengths: Sequence[int], shared_tokens: int = 0) -> Ledger:
    """The accounts for sequences of these `lengths` (tokens each), of which the first `shared_tokens` are common to all.

    Only full blocks are shared: a common tail shorter than a block is stored by each. Raises InvalidArgument for a negative
    length, and for more shared tokens than the shortest sequence has.
    """
    if any(type(length) is not int or length < 0 for length in lengths):
        raise InvalidArgument(f"lengths {list(lengths)!r}: give whole numbers of tokens, 0 or more")
    if not 0 <= shared_tokens <= min(lengths, default=0):
        raise InvalidArgument(f"{shared_tokens} shared tokens: give 0 up to the shortest sequence's {min(lengths, default=0)}")
    block_tokens = geometry.block_tokens
    entries = sum(-(-length // block_tokens) for length in lengths)
    saved_blocks = (shared_tokens // block_tokens) * max(len(lengths) - 1, 0)
    effective = sum(lengths) - saved_blocks * block_tokens
    padded = len(lengths) * max(lengths, default=0)
    blocks = entries - saved_blocks
    return Ledger(
        bytes_per_token=geometry.bytes_per_token,
        block_bytes=geometry.block_bytes,
        effective_positions=effective,
        padded_positions=padded,
        paged_positions=blocks * block_tokens,
        table_entries=entries,
        blocks=blocks,
        effective_bytes=effective * geometry.bytes_per_token,
        padded_bytes=padded * geometry.bytes_per_token,
        paged_bytes=blocks * geometry.block_bytes,
        slots_bytes=blocks * geometry.slot_bytes,
    )


@dataclass(frozen=True)
class RankShare:
    """What one rank of a tensor- and pipeline-parallel model holds. Ranks with equal `stage` and `shard` hold equal bytes."""

    stage: int
    rank: int
    shard: int
    geometry: Geometry


def split(geometry: Geometry, tensor_parallel: int = 1, pipeline_stages: int = 1) -> tuple[RankShare, ...]:
    """Every rank's share of a whole model's geometry, stage by stage.

    Raises GeometryError for more stages than layers, and where neither KV heads nor ranks divide the other.
    """
    if tensor_parallel < 1:
        raise GeometryError(f"tensor_parallel is {tensor_parallel}; give at least 1")
    shares = []
    for stage, layers in enumerate(stage_layers(geometry.layers, pipeline_stages)):
        for rank in range(tensor_parallel):
            part, shard = geometry.with_layers(layers).shard(tensor_parallel, rank)
            shares.append(RankShare(stage, rank, shard, part))
    return tuple(shares)


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per pipeline stage, as equal as may be, the larger ones first."""
    if not 1 <= stages <= layers:
        raise GeometryError(f"{stages} pipeline stages over {layers} layers: give 1 to {layers}")
    each, more = divmod(layers, stages)
    return tuple(each + (stage < more) for stage in range(stages))


def query_key_pairs(tokens: int, cached: bool) -> int:
    """Query-key products of causal attention to write `tokens` tokens one by one, per head and layer.

    With the keys kept, each step adds one query: T(T+1)/2. Without, each computes the whole prefix again: T(T+1)(T+2)/6.
    """
    return tokens * (tokens + 1) // 2 if cached else tokens * (tokens + 1) * (tokens + 2) // 6


def memory_share(kv_bytes: int, weights_bytes: int) -> float:
    """The part of a model's memory that its KV takes: KV over KV and weights together, 0 to 1."""
    return kv_bytes / (kv_bytes + weights_bytes)


def bytes_ratio(geometry: Geometry, other: Geometry) -> float:
    """How many times larger the other's KV is, per token; for grouped heads against full ones this is H_q / H_kv."""
    return other.bytes_per_token / geometry.bytes_per_token
