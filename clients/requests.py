"""The messages that a client sends, made from the store's own values. Pure."""

from __future__ import annotations

import os
import reprlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore import hashing
from kvstore.clients.blocks import Prompt, Tokens
from kvstore.clients.handles import Namespace
from kvstore.clients.pools import PoolTerms
from kvstore.config import MAX_BYTES
from kvstore.errors import InvalidArgument, LimitExceeded
from kvstore.geometry import Geometry
from kvstore.hashing import HASH_BYTES, Identity
from kvstore.proto import kvstore_pb2 as pb

MAX_BLOCKS_PER_CALL = 8192  # the daemon's bound: a 131,072-token prompt in blocks of 16
MAX_TOKENS_PER_CALL = 524_288  # token ids: the daemon's bound, half of the largest message
MAX_TIMEOUT_S = 3600.0  # seconds: the daemon's bound
MAX_WINDOW_TOKENS = 2**31  # tokens: far more than any model attends to
MODEL_FACTS = ("model", "revision", "tokenizer", "position", "dtype")  # an identity without adapter and salt

Words = NDArray[np.uint32]


@dataclass(frozen=True)
class Keep:
    """What a namespace keeps of a sequence: "all" blocks, a trailing "window" of tokens, or the "state" at a boundary."""

    kind: str = "all"
    window_tokens: int = 0


KEEP_ALL = Keep()


def open_namespace(
    identity: Identity, geometry: Geometry, shard: str, kv_group: str, keep: Keep, tails: bool = False
) -> pb.OpenNamespaceRequest:
    """The request that names a namespace by all its facts. `tails`: have it keep token ids. Raises InvalidArgument."""
    fields = identity.fields()
    checked_text("shard", shard)
    checked_text("kv_group", kv_group)
    checked_text("keep's kind", keep.kind)
    checked_count("keep's window_tokens", keep.window_tokens, MAX_WINDOW_TOKENS)
    return pb.OpenNamespaceRequest(
        facts={name: fields[name] for name in MODEL_FACTS},
        geometry=geometry_message(geometry),
        shard=shard,
        kv_group=kv_group,
        keep=pb.Keep(kind=keep.kind, window_tokens=keep.window_tokens),
        tails=tails,
    )


def geometry_message(geometry: Geometry) -> pb.Geometry:
    """A geometry for the wire."""
    quant = geometry.quant
    return pb.Geometry(
        kind=geometry.kind,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        key_dim=geometry.key_dim,
        value_dim=geometry.value_dim,
        latent_dim=geometry.latent_dim,
        rope_dim=geometry.rope_dim,
        dtype=geometry.dtype,
        block_tokens=geometry.block_tokens,
        format=geometry.format,
        opaque_block_bytes=geometry.opaque_block_bytes,
        quant=None if quant is None else pb.Quant(scheme=quant.scheme, granularity=quant.granularity, scale_dtype=quant.scale_dtype),
    )


def checked_hashes(hashes: bytes) -> bytes:
    """Packed hashes, 32 bytes a block. Raises InvalidArgument for another length, LimitExceeded for more blocks than a call takes."""
    if len(hashes) % HASH_BYTES:
        raise InvalidArgument(f"{len(hashes)} bytes are no whole number of hashes; give {HASH_BYTES} bytes a block")
    if len(hashes) > MAX_BLOCKS_PER_CALL * HASH_BYTES:
        raise LimitExceeded(f"{len(hashes) // HASH_BYTES} blocks in one call, the most is {MAX_BLOCKS_PER_CALL}; split the chain")
    return bytes(hashes)


def checked_parent(parent: bytes) -> None:
    """Raises InvalidArgument where this is no hash."""
    if len(parent) != HASH_BYTES:
        raise InvalidArgument(f"the parent has {len(parent)} bytes; give the {HASH_BYTES} bytes of a hash")


def checked_text(what: str, value: object) -> None:
    """Raises InvalidArgument where this is no text that can be sent."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{what} is {reprlib.repr(value)}; give a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{what} has half of a surrogate pair at {error.start}; give text that UTF-8 can write") from None


def checked_count(what: str, value: object, most: int) -> None:
    """Raises InvalidArgument unless this is a whole number from 0 to `most`."""
    if not isinstance(value, (int, np.integer)) or not 0 <= value <= most:
        raise InvalidArgument(f"{what} is {reprlib.repr(value)}; give a whole number from 0 to {most}")


def checked_timeout(timeout_s: object) -> None:
    """Raises InvalidArgument unless a request may wait so long: what is not a number compares as false."""
    if not isinstance(timeout_s, (int, float, np.integer, np.floating)) or not 0 <= timeout_s <= MAX_TIMEOUT_S:
        raise InvalidArgument(f"timeout_s is {reprlib.repr(timeout_s)}; give 0 to {MAX_TIMEOUT_S:g} seconds")


def hello(name: str, guarantee_bytes: int, limit_bytes: int, pools: Sequence[PoolTerms] = ()) -> pb.Hello:
    """The first message of a session. Without a name the process's host and id. `pools`: what to map of GPUs' memory.

    Raises InvalidArgument for what cannot be sent.
    """
    checked_text("name", name)
    checked_count("guarantee_bytes", guarantee_bytes, MAX_BYTES)
    checked_count("limit_bytes", limit_bytes, MAX_BYTES)
    client = name or f"{socket.gethostname()}/{os.getpid()}"
    terms = [each.message() for each in pools]
    return pb.Hello(client=client, guarantee_bytes=guarantee_bytes, limit_bytes=limit_bytes, maps_arena=True, pools=terms)


def prompt_or_hashes(namespace: Namespace, hashes: bytes | None, tokens: Tokens | None, identity: Identity | None) -> bytes:
    """The hashes to look for: those given, or of a prompt's blocks that may be used.

    Raises InvalidArgument unless one is given, LimitExceeded for more blocks than a call takes.
    """
    if hashes is not None and tokens is None:
        return checked_hashes(hashes)
    if tokens is None or hashes is not None:
        raise InvalidArgument("give hashes or tokens, one of them")
    block_tokens = namespace.geometry.block_tokens
    usable = hashing.usable_blocks(len(tokens), block_tokens)
    if usable > MAX_BLOCKS_PER_CALL:
        most = f"the most is {MAX_BLOCKS_PER_CALL}; give the first {MAX_BLOCKS_PER_CALL * block_tokens} tokens of it"
        raise LimitExceeded(f"a prompt of {usable} blocks in one call, {most}")
    root = hashing.fingerprint(identity or namespace.identity)
    return checked_hashes(hashing.block_hashes(root, tokens, block_tokens)[: hashing.HASH_BYTES * usable])


def explain(namespace: Namespace, hashes: bytes | None, tokens: Tokens | None, identity: Identity | None) -> pb.ExplainRequest:
    """The request without its namespace. Raises InvalidArgument unless hashes or a prompt is given, LimitExceeded for too long a one."""
    wanted = prompt_or_hashes(namespace, hashes, tokens, identity)
    if tokens is None:
        return pb.ExplainRequest(hashes=wanted)
    of = identity or namespace.identity
    return pb.ExplainRequest(token_ids=hashing.token_bytes(tokens), adapter=of.adapter, salt=of.salt)


# ---- operations; `pool` is a Pool's number, 0 the arena in host memory


def acquire(lease: int, namespace_id: int, hashes: bytes, timeout_s: float, prompt: Prompt | None = None, *, pool: int = 0) -> pb.Op:
    """Lease the leading blocks, and with a prompt a partial tail; one that is too long for a call is left out."""
    op = pb.Op(acquire={"lease": lease, "namespace_id": namespace_id, "hashes": hashes, "timeout_s": timeout_s}, pool=pool)
    if prompt is not None and 0 < len(prompt.tokens) <= MAX_TOKENS_PER_CALL:
        checked_parent(prompt.root)
        op.acquire.token_ids, op.acquire.root = hashing.token_bytes(prompt.tokens), prompt.root
    return op


def reserve(reservation: int, namespace_id: int, *, count: int = 0, hashes: bytes = b"", pool: int = 0) -> pb.Op:
    """Slots for known hashes, or so many anonymous ones."""
    facts = {"reservation": reservation, "namespace_id": namespace_id, "count": count, "hashes": hashes}
    return pb.Op(reserve=facts, pool=pool)


def commit(
    lease: int, namespace_id: int, slots: tuple[Words, Words], hashes: bytes, parents: bytes, token_ids: bytes = b"", *, pool: int = 0
) -> pb.Op:
    """Publish filled slots (units, generations). `parents` is one hash for a chain, or one a block; `token_ids` all of theirs, packed."""
    units, generations = (np.ascontiguousarray(words, "<u4").tobytes() for words in slots)
    facts = {"lease": lease, "namespace_id": namespace_id, "units": units, "generations": generations, "token_ids": token_ids}
    return pb.Op(commit={**facts, "hashes": hashes, "parents": parents}, pool=pool)  # a message of its own would be copied


def abandon(reservation: int, slots: tuple[Words, Words] | None = None, *, pool: int = 0) -> pb.Op:
    """Give slots back: these, or all that is left of the reservation."""
    units, generations = (np.ascontiguousarray(words, "<u4").tobytes() for words in slots) if slots else (b"", b"")
    return pb.Op(abandon=pb.Abandon(reservation=reservation, units=units, generations=generations), pool=pool)


def release(lease: int, keep_blocks: int = 0, *, pool: int = 0) -> pb.Op:
    """End a lease, or all of it past its first blocks."""
    return pb.Op(release=pb.Release(lease=lease, keep_blocks=keep_blocks), pool=pool)
