"""Between the wire and the cache: every message that comes in is checked here, field by field, and becomes an input. Pure.

Everything raises InvalidArgument (or LimitExceeded, where a named limit is passed) for what a message may not hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import errors
from kvstore.cache.messages import (
    HASH_BYTES,
    MAX_BLOCKS_PER_BATCH,
    Abandon,
    Acquire,
    Acquired,
    Claim,
    Claimed,
    Commit,
    Committed,
    Done,
    Granted,
    Hashes,
    Keep,
    KeepKind,
    Outcome,
    Prompt,
    Refused,
    Release,
    Reserve,
    Reserved,
    Tokens,
    Units,
    unpack_hashes,
)
from kvstore.geometry import GRANULARITIES, Geometry, Quant
from kvstore.hashing import Identity
from kvstore.proto import kvstore_pb2 as pb

MAX_GROUP_MEMBERS = 256  # namespaces: 64 tensor-parallel shards of a model with four KV groups
MAX_TEXT_CHARS = 4096  # of a name or a fact: a position holds every rope parameter as JSON, which is some hundred
MAX_TIMEOUT_S = 3600.0  # an hour: a longer wait for blocks is a mistake in the unit
MAX_GRANT_SLOTS = 65_536  # slots in one Grant: 512 KiB, far below the largest message
MAX_REPLY_BYTES = 2**20  # 1 MiB of replies in one message: far below the largest
MAX_ID = 2**62  # ids of leases and reservations: what 64 bits with a sign hold, with room
MODEL_FACTS = frozenset({"model", "revision", "tokenizer", "position", "dtype"})  # an identity without adapter and salt

Reply = pb.OpReply | Mapping[str, Mapping[str, Any]]  # an operation's answer, or its fields: one object less to make of each
Input = Acquire | Claim | Reserve | Commit | Abandon | Release


# ---------------------------------------------------------------- values


def hashes_of(packed: bytes, what: str = "hashes") -> Hashes:
    """Packed hashes as [n, 4] words; at least one, at most a batch's."""
    if not packed or len(packed) % HASH_BYTES:
        raise errors.InvalidArgument(f"{what} has {len(packed)} bytes; give {HASH_BYTES} a block, and at least one block")
    if len(packed) > HASH_BYTES * MAX_BLOCKS_PER_BATCH:
        raise errors.LimitExceeded(f"{what} names {len(packed) // HASH_BYTES} blocks, the most is {MAX_BLOCKS_PER_BATCH}; split the call")
    return unpack_hashes(packed)


def words_of(packed: bytes, count: int, what: str) -> Units:
    """`count` packed 32-bit numbers."""
    if len(packed) != 4 * count:
        raise errors.InvalidArgument(f"{what} has {len(packed)} bytes for {count} blocks; give 4 a block")
    return np.frombuffer(packed, "<u4")


def tokens_of(packed: bytes) -> Tokens:
    """Packed token ids, at most a batch's."""
    if len(packed) % 4:
        raise errors.InvalidArgument(f"token_ids has {len(packed)} bytes; give 4 a token")
    return np.frombuffer(packed, "<u4")


def text_of(text: str, what: str) -> str:
    """A name or a fact of bounded length."""
    if len(text) > MAX_TEXT_CHARS:
        raise errors.LimitExceeded(f"{what} has {len(text)} characters, the most is {MAX_TEXT_CHARS}; give a digest instead")
    return text


def seconds_of(value: float, what: str, most: float = MAX_TIMEOUT_S) -> float:
    """A time to wait, cut to what the daemon allows."""
    if not math.isfinite(value) or not 0 <= value <= MAX_TIMEOUT_S:
        raise errors.InvalidArgument(f"{what} is {value}; give 0 to {MAX_TIMEOUT_S:g} seconds")
    return min(value, most)


def id_of(value: int, what: str) -> int:
    """An id that a client chose."""
    if not 0 < value < MAX_ID:
        raise errors.InvalidArgument(f"{what} is {value}; give a positive number below 2^62")
    return value


# ---------------------------------------------------------------- namespaces


def identity_of(request: pb.OpenNamespaceRequest) -> Identity:
    """The model facts; all five must be there, and no others."""
    facts = dict(request.facts)
    if set(facts) != MODEL_FACTS:
        raise errors.InvalidArgument(f"facts are {sorted(facts)}; give exactly {', '.join(sorted(MODEL_FACTS))} (\"\" where unused)")
    return Identity(**{name: text_of(value, name) for name, value in facts.items()})


def geometry_of(message: pb.Geometry) -> Geometry:
    """The layout of a block. Raises GeometryError, which is an InvalidArgument, too."""
    quant = None
    if message.HasField("quant"):
        granularity = next((name for name in GRANULARITIES if name == message.quant.granularity), None)
        if granularity is None:
            raise errors.GeometryError(f"granularity {message.quant.granularity!r} is unknown; use one of {', '.join(GRANULARITIES)}")
        quant = Quant(message.quant.scheme, granularity, message.quant.scale_dtype)
    return Geometry(
        message.kind,
        message.layers,
        message.kv_heads,
        message.key_dim,
        message.value_dim,
        message.dtype,
        message.block_tokens,
        text_of(message.format, "format"),
        quant,
        message.latent_dim,
        message.rope_dim,
        message.opaque_block_bytes,
    )


def check_tails(geometry: Geometry) -> None:
    """Raises GeometryError where a block's first tokens are of no use without the rest."""
    if not geometry.tokens_apart:
        raise errors.GeometryError(
            f"format {geometry.format!r} with quant {geometry.fields()['quant'] or 'none'} has no tails: "
            "use kv1, with one scale a token or none; or open the namespace without tails"
        )


def keep_of(message: pb.Keep, block_tokens: int) -> Keep:
    """What a namespace keeps of a sequence; a window in tokens becomes the blocks that cover it."""
    kinds = [kind.value for kind in KeepKind]
    if (message.kind or KeepKind.ALL) not in kinds:
        raise errors.InvalidArgument(f"keep {message.kind!r} is unknown; use one of {', '.join(kinds)}")
    kind = KeepKind(message.kind or KeepKind.ALL)
    if (kind is KeepKind.WINDOW) != bool(message.window_tokens):
        raise errors.InvalidArgument(f"keep {kind} with window_tokens {message.window_tokens}; give tokens with a window, and only there")
    return Keep(kind, -(-message.window_tokens // block_tokens))


# ---------------------------------------------------------------- operations


def input_of(op: pb.Op, session: int, now: float, longest_wait_s: float) -> Input:
    """One operation of a session's batch."""
    match op.WhichOneof("kind"):
        case "acquire":
            return _acquire_of(op.acquire, session, now, longest_wait_s)
        case "claim":
            claim = op.claim
            return Claim(session, id_of(claim.lease, "lease"), text_of(claim.group, "group"), claim.namespace_id)
        case "reserve":
            return _reserve_of(op.reserve, session)
        case "commit":
            return _commit_of(op.commit, session)
        case "abandon":
            return _abandon_of(op.abandon, session)
        case "release":
            return Release(session, id_of(op.release.lease, "lease"), op.release.keep_blocks)
        case _:
            raise errors.InvalidArgument("an operation is empty; set one of acquire, claim, reserve, commit, abandon, release")


def _acquire_of(acquire: pb.Acquire, session: int, now: float, longest_wait_s: float) -> Acquire:
    timeout_s = seconds_of(acquire.timeout_s, "timeout_s", longest_wait_s)
    namespace, group = _whose(acquire.namespace_id, acquire.group)
    prompt = None
    if acquire.token_ids:
        if len(acquire.root) != HASH_BYTES:
            raise errors.InvalidArgument(f"root has {len(acquire.root)} bytes; with token_ids give the hash before the first block")
        prompt = Prompt(acquire.root, tokens_of(acquire.token_ids))
    hashes = hashes_of(acquire.hashes) if acquire.hashes or prompt is None else unpack_hashes(b"")
    return Acquire(session, id_of(acquire.lease, "lease"), hashes, now + timeout_s, namespace, group, prompt)


def _whose(namespace: int, group: str) -> tuple[int, str]:
    if bool(namespace) == bool(group):
        raise errors.InvalidArgument(f"namespace_id is {namespace} and group {group!r}; give one of them")
    return namespace, text_of(group, "group")


def _reserve_of(reserve: pb.Reserve, session: int) -> Reserve:
    if bool(reserve.count) == bool(reserve.hashes):
        raise errors.InvalidArgument("reserve takes a count of anonymous slots or the hashes of known blocks; give one of them")
    hashes = hashes_of(reserve.hashes) if reserve.hashes else None
    return Reserve(session, id_of(reserve.reservation, "reservation"), reserve.namespace_id, reserve.count, hashes)


def _commit_of(commit: pb.Commit, session: int) -> Commit:
    hashes = hashes_of(commit.hashes)
    count = len(hashes)
    parents = hashes_of(commit.parents, "parents")
    if len(parents) not in (1, count):
        raise errors.InvalidArgument(f"{len(parents)} parents for {count} blocks; give the first block's, or one a block")
    checksums: NDArray[np.uint64] | None = None
    if commit.checksums:
        if len(commit.checksums) != 16 * count:
            raise errors.InvalidArgument(f"checksums has {len(commit.checksums)} bytes for {count} blocks; give 16 a block, or none")
        checksums = np.frombuffer(commit.checksums, "<u8").reshape(count, 2)
    return Commit(
        session,
        id_of(commit.lease, "lease"),
        commit.namespace_id,
        words_of(commit.units, count, "units"),
        words_of(commit.generations, count, "generations"),
        hashes,
        parents,
        checksums,
        tokens_of(commit.token_ids) if commit.token_ids else None,
    )


def _abandon_of(abandon: pb.Abandon, session: int) -> Abandon:
    reservation = id_of(abandon.reservation, "reservation")
    if not abandon.units:
        return Abandon(session, reservation)
    count = len(abandon.units) // 4
    if count > MAX_BLOCKS_PER_BATCH:
        raise errors.LimitExceeded(f"abandon names {count} slots, the most is {MAX_BLOCKS_PER_BATCH}; split it")
    return Abandon(
        session, reservation, words_of(abandon.units, count, "units"), words_of(abandon.generations, count, "generations")
    )


# ---------------------------------------------------------------- replies


def reply_of(outcome: Outcome, request_id: int) -> pb.OpReply:
    """What one operation answered. `request_id`: its lease or reservation."""
    match outcome:
        case Acquired(lease, expected, reason, tail_tokens):
            acquired = pb.Acquired(lease=lease, expected_blocks=expected, reason=reason, tail_tokens=tail_tokens)
            return pb.OpReply(acquired=acquired)
        case Claimed(lease, units, generations):
            return pb.OpReply(slots=pb.SlotReply(id=lease, units=packed(units), generations=packed(generations)))
        case Reserved(_, outcomes, units, generations) | Committed(_, outcomes, units, generations):
            slots = pb.SlotReply(id=request_id, outcomes=outcomes.tobytes(), units=packed(units), generations=packed(generations))
            return pb.OpReply(slots=slots)
        case Done(count):
            return pb.OpReply(done=pb.Done(count=count))
        case Refused(code, text):
            # The session is alive, or nobody would read this: a precondition that failed is the operation's own.
            return pb.OpReply(error=pb.Error(code="INVALID_ARGUMENT" if code == "FAILED_PRECONDITION" else code, text=text))


def error_reply(error: errors.KVStoreError) -> pb.OpReply:
    """An operation that was refused here."""
    return pb.OpReply(error=pb.Error(code=error.code, text=errors.to_text(error)))


def batch_messages(number: int, replies: Sequence[Reply], grants: list[pb.Grant]) -> Iterator[pb.ServerMessage]:
    """A batch's answer, and then what it granted at once, in messages of bounded size: mostly one."""
    whole = pb.ServerMessage(reply={"number": number, "replies": replies, "grants": grants})
    if whole.ByteSize() < MAX_REPLY_BYTES:
        yield whole
        return
    made = list(whole.reply.replies)
    first = size_bytes = taken = 0
    for end, reply in enumerate(made, start=1):
        size_bytes += reply.ByteSize()
        if size_bytes < MAX_REPLY_BYTES and end < len(made):
            continue
        answer = pb.BatchReply(number=number, replies=made[first:end], first_op=first)
        while end == len(made) and taken < len(grants) and size_bytes < MAX_REPLY_BYTES:
            size_bytes += grants[taken].ByteSize()
            taken += 1
        answer.grants.extend(grants[:taken])
        yield pb.ServerMessage(reply=answer)
        first, size_bytes = end, 0
    for grant in grants[taken:]:
        yield pb.ServerMessage(grant=grant)


def grants_of(granted: Granted, pool: int = 0) -> Iterator[pb.Grant]:
    """A grant, in messages of bounded size; the last one says whether more may come."""
    members, count = granted.units.shape
    step = max(1, MAX_GRANT_SLOTS // max(members, 1))
    for start in range(0, max(count, 1), step):
        last = start + step >= count
        yield pb.Grant(
            lease=granted.lease,
            first_block=granted.first + start,
            members=members,
            units=packed(granted.units[:, start : start + step]),
            generations=packed(granted.generations[:, start : start + step]),
            ended=granted.ended or "" if last else "",
            pool=pool,
        )


def packed(words: Units) -> bytes:
    """32-bit numbers for the wire."""
    return np.ascontiguousarray(words, "<u4").tobytes()


def refusal(refused: Refused, *, session_ended: bool = False) -> errors.KVStoreError:
    """The error of a call that the cache refused."""
    if refused.code == "FAILED_PRECONDITION" and not session_ended:
        return errors.InvalidArgument(refused.text)
    return errors.from_code(refused.code, refused.text)
