"""The bounds of a batch as a whole, looked at before any of its operations is carried out. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.cache.messages import HASH_BYTES, MAX_BLOCKS_PER_BATCH
from kvstore.errors import LimitExceeded
from kvstore.proto import kvstore_pb2 as pb

MAX_OPS_PER_BATCH = 1024  # operations: 128 sequences of a decode step need a few each
MAX_TOKENS_PER_BATCH = 524_288  # token ids: 2 MiB, half of the largest message
ID_BYTES = 8  # bytes of an id in a packed operation
PACKED = {"reserve_each": "reserve", "commit_each": "commit", "release_each": "release"}  # packed operations: the kinds they stand for


def check_length(batch: pb.Batch) -> None:
    """Before any operation is looked at: a long list of empty ones would keep everybody waiting. Raises LimitExceeded."""
    if len(batch.ops) > MAX_OPS_PER_BATCH:
        raise LimitExceeded(f"a batch has {len(batch.ops)} operations; give 1 to {MAX_OPS_PER_BATCH}")


def check_batch(batch: pb.Batch, ops: Sequence[pb.Op]) -> list[str]:
    """Answers the kinds of the batch's operations, which `ops` are. Raises LimitExceeded."""
    kinds = [op.WhichOneof("kind") or "none" for op in ops]
    packed = {at: _stands_for(ops[at], kind) for at, kind in enumerate(kinds) if kind in PACKED}
    count = len(ops) - len(packed) + sum(packed.values())
    if not 0 < count <= MAX_OPS_PER_BATCH:
        raise LimitExceeded(f"a batch has {count} operations; give 1 to {MAX_OPS_PER_BATCH}")
    slots = sum([op.reserve.count for kind, op in zip(kinds, ops, strict=True) if kind == "reserve"])
    slots += sum(number for at, number in packed.items() if kinds[at] == "reserve_each")
    size_bytes = batch.ByteSize()
    if slots + size_bytes // HASH_BYTES <= MAX_BLOCKS_PER_BATCH and size_bytes // 4 <= MAX_TOKENS_PER_BATCH:
        return kinds  # so short a message cannot name more
    blocks, tokens = slots, 0
    for kind, op in zip(kinds, ops, strict=True):
        if kind == "reserve":
            blocks += len(op.reserve.hashes) // HASH_BYTES
        elif kind == "commit_each":
            blocks += len(op.commit_each.hashes) // HASH_BYTES
        elif kind in ("commit", "acquire"):
            named = op.commit if kind == "commit" else op.acquire
            blocks += len(named.hashes) // HASH_BYTES
            tokens += len(named.token_ids) // 4
    if blocks > MAX_BLOCKS_PER_BATCH:
        raise LimitExceeded(f"a batch names {blocks} blocks, the most is {MAX_BLOCKS_PER_BATCH}; split it")
    if tokens > MAX_TOKENS_PER_BATCH:
        raise LimitExceeded(f"a batch has {tokens} token ids, the most is {MAX_TOKENS_PER_BATCH}; split it, or send none")
    return kinds


def _stands_for(op: pb.Op, kind: str) -> int:
    """How many operations a packed one stands for; whatever is wrong with it, at least for itself."""
    match kind:
        case "reserve_each":
            ids = op.reserve_each.reservations
        case "commit_each":
            ids = op.commit_each.leases
        case _:
            ids = op.release_each.leases
    return max(1, len(ids) // ID_BYTES)
