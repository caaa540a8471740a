"""What names a block: the identity of the model, and the chain of hashes over the tokens.

    fingerprint  = SHA-256("kvstore/1\\n" ‖ canonical JSON of the identity)
    block hash   = SHA-256(parent ‖ LE32(n) ‖ n × LE32(token) ‖ extra)      the parent of block 0 is the fingerprint
    extra        = for each (tag, value), sorted: LE32(len) ‖ tag ‖ LE32(len) ‖ value
    opaque block = SHA-256("opaque/1\\n" ‖ fingerprint ‖ LE32(len) ‖ scheme ‖ engine hash)
    namespace    = SHA-256("namespace/1\\n" ‖ canonical JSON of its facts)

Everything here is pure, gives the same bytes in every process, and may be called from any thread.
"""

import array
import contextlib
import hashlib
import json
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidArgument
from kvstore.native.chain import chain_hashes

HASH_BYTES = 32  # SHA-256
MAX_TOKEN_ID = 2**32 - 1  # token ids are hashed as 32 bits
# Rope kinds under which a key changes when the sequence grows past a length, so a stored one is right for some requests only.
# "su" is what Phi-3 first called longrope.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope", "su"})
# Engine hashes that start from a random seed in each process: the same tokens never hash the same twice.
_SEEDED_SCHEME = re.compile(r"(^|/)(builtin|random|xxhash|(python_?)?hash$)", re.IGNORECASE)

ExtraPairs = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Identity:
    """The facts under which keys and values may be used again. All seven are always there, "" where unused.

    Give digests or immutable ids where a name can move: `revision` a commit, `adapter` the digest of its weights.
    `position` holds every rope parameter (JSON, as in a model's configuration). Raises InvalidArgument for a value that
    is no string, and for a position under which keys depend on the sequence's total length.
    """

    model: str = ""
    revision: str = ""
    adapter: str = ""
    tokenizer: str = ""
    position: str = ""
    dtype: str = ""
    salt: str = ""

    def __post_init__(self) -> None:
        canonical_json(self.fields())
        check_position(self.position)

    def fields(self) -> dict[str, str]:
        """The seven facts by name."""
        return asdict(self)


def check_position(position: str) -> None:
    """Refuse (InvalidArgument) a position under which a key depends on the total length: rope kinds dynamic and longrope."""
    try:
        kinds = _rope_kinds(json.loads(position))
    except (ValueError, RecursionError):  # no JSON, or nested past all reason: any word in it may be the kind
        kinds = set(re.findall(r"[a-z]+", position.lower()))
    refused = sorted(kinds & LENGTH_DEPENDENT_ROPE)
    if refused:
        raise InvalidArgument(
            f"position: rope kind {refused[0]!r} makes keys depend on the sequence's total length, so they cannot be used again; "
            "serve this model without the store, or set a rope kind that does not (default, linear, llama3, yarn)"
        )


def _rope_kinds(value: object) -> set[str]:
    """Every rope kind named anywhere in a parsed position; models with several attention kinds nest one per kind."""
    if isinstance(value, str):
        return {value.lower()}
    if isinstance(value, dict):
        named = {str(value[key]).lower() for key in ("rope_type", "type") if key in value}
        return named.union(*(_rope_kinds(inner) for inner in value.values() if isinstance(inner, dict)))
    return set()


def canonical_json(fields: Mapping[str, str]) -> bytes:
    """UTF-8 JSON with sorted keys, no spaces and the shortest escapes. Raises InvalidArgument unless all are valid strings."""
    for name, value in fields.items():
        _check_text(name, name)
        _check_text(name, value)
    text = json.dumps(dict(fields), ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"a field holds half of a surrogate pair ({error.reason}); give valid Unicode text") from error


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidArgument(f"field {name!r}: {value!r} is a {type(value).__name__}; give a string")


def fingerprint(identity: Identity) -> bytes:
    """The root of every chain under this identity: 32 bytes."""
    return hashlib.sha256(b"kvstore/1\n" + canonical_json(identity.fields())).digest()


def namespace_digest(fields: Mapping[str, str]) -> bytes:
    """The 32 bytes that name a namespace, from its facts."""
    return hashlib.sha256(b"namespace/1\n" + canonical_json(fields)).digest()


def block_hash(parent: bytes, tokens: Sequence[int] | NDArray[np.integer], extra: ExtraPairs = ()) -> bytes:
    """The hash of one block under its parent (32 bytes; the fingerprint for the first block)."""
    _check_hash(parent, "parent")
    ids = token_bytes(tokens)
    return hashlib.sha256(parent + struct.pack("<I", len(ids) // 4) + ids + _extra_bytes(extra)).digest()


def block_hashes(
    root: bytes,
    tokens: Sequence[int] | NDArray[np.integer],
    block_tokens: int,
    extras: Mapping[int, ExtraPairs] | None = None,
) -> bytes:
    """The chain of all full blocks of `tokens`, packed: 32 bytes a block, in order.

    root          the fingerprint, or the hash of the block before `tokens`
    tokens        [n] ids in 0 .. 2^32-1; a tail shorter than a block makes no hash
    extras        (tag, value) pairs by block, counted from the first of `tokens`; those of blocks past the last full one are unused
    Raises InvalidArgument for a root that is not 32 bytes, ids out of range, a block size below 1, equal pairs in one block.
    """
    _check_hash(root, "root")
    if block_tokens < 1:
        raise InvalidArgument(f"block_tokens is {block_tokens}; give at least 1")
    ids = token_bytes(tokens)
    extra_of = {block: _extra_bytes(pairs) for block, pairs in extras.items()} if extras else {}
    if extra_of and min(extra_of) < 0:
        raise InvalidArgument(f"extras name block {min(extra_of)}; count blocks from 0")
    hashes = chain_hashes(root, ids, block_tokens, extra_of)
    return _chain(root, ids, block_tokens, extra_of) if hashes is None else hashes


def _chain(root: bytes, ids: bytes, block_tokens: int, extra_of: Mapping[int, bytes]) -> bytes:
    """What `chain_hashes` does in C."""
    step = 4 * block_tokens
    head = struct.pack("<I", block_tokens)
    sha256 = hashlib.sha256
    parent = root
    hashes = []
    for block, start in enumerate(range(0, len(ids) - step + 1, step)):
        parent = sha256(parent + head + ids[start : start + step] + extra_of.get(block, b"")).digest()
        hashes.append(parent)
    return b"".join(hashes)


def misnamed_blocks(hashes: bytes, parents: bytes, ids: bytes, block_tokens: int) -> list[int]:
    """Which blocks (without extra) are not named by the hash of their tokens under their parent, by number.

    hashes, parents   32 bytes a block;  ids   4 × block_tokens bytes a block: little-endian 32-bit token ids
    """
    if parents[HASH_BYTES:] == hashes[:-HASH_BYTES]:  # one chain
        made = chain_hashes(parents[:HASH_BYTES], ids, block_tokens, {})
        if (_chain(parents[:HASH_BYTES], ids, block_tokens, {}) if made is None else made) == hashes:
            return []
    step, head, sha256 = 4 * block_tokens, struct.pack("<I", block_tokens), hashlib.sha256
    names = (hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES))
    return [
        block
        for block, name in enumerate(names)
        if sha256(parents[HASH_BYTES * block : HASH_BYTES * (block + 1)] + head + ids[step * block : step * (block + 1)]).digest() != name
    ]


def opaque_block_hash(fingerprint: bytes, scheme: str, engine_hash: bytes) -> bytes:
    """The name of a block that an engine hashed by its own `scheme` ("vllm/sha256_cbor").

    Raises InvalidArgument for a scheme with a random seed: another process would never find the block.
    """
    _check_hash(fingerprint, "fingerprint")
    if not scheme or _SEEDED_SCHEME.search(scheme):
        raise InvalidArgument(f"hash scheme {scheme!r} differs from process to process; set the engine to a SHA-256 one")
    if not engine_hash:
        raise InvalidArgument("the engine's hash is empty; pass the bytes that the engine made")
    try:
        name = scheme.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"the scheme holds half of a surrogate pair ({error.reason}); give valid Unicode text") from error
    return hashlib.sha256(b"opaque/1\n" + fingerprint + struct.pack("<I", len(name)) + name + engine_hash).digest()


def usable_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """How many full blocks a prompt may take from the store: the last token is always computed, for its logits."""
    return max(prompt_tokens - 1, 0) // block_tokens


def _check_hash(value: bytes, name: str) -> None:
    if len(value) != HASH_BYTES:
        raise InvalidArgument(f"{name} has {len(value)} bytes; give the {HASH_BYTES} bytes of a hash")


def token_bytes(tokens: Sequence[int] | NDArray[np.integer]) -> bytes:
    """All ids as little-endian 32-bit numbers, converted at once. Raises InvalidArgument for what is no flat sequence of them."""
    if type(tokens) is list and tokens and type(tokens[0]) is int:
        # The usual case, a prompt, takes a sixth of the time this way. What does not fit is told below.
        with contextlib.suppress(TypeError, OverflowError):
            return array.array("I", tokens).tobytes() if sys.byteorder == "little" else struct.pack(f"<{len(tokens)}I", *tokens)
    try:
        ids = np.asarray(tokens)
    except (OverflowError, ValueError) as error:
        raise InvalidArgument(f"token ids: {error}; give a flat sequence of integers") from error
    if ids.ndim != 1:
        raise InvalidArgument(f"token ids have shape {ids.shape}; give one flat sequence")
    if ids.size == 0:
        return b""
    if ids.dtype.kind == "O" and all(type(token) is int for token in tokens):
        raise InvalidArgument(f"a token id is outside 0..{MAX_TOKEN_ID}; it must fit 32 bits")
    if ids.dtype.kind not in "iu":
        raise InvalidArgument(f"token ids are of type {ids.dtype}; give integers")
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest > MAX_TOKEN_ID:
        raise InvalidArgument(f"token id {lowest if lowest < 0 else highest} is outside 0..{MAX_TOKEN_ID}; it must fit 32 bits")
    return ids.astype("<u4").tobytes()


def _extra_bytes(pairs: ExtraPairs) -> bytes:
    ordered = sorted((bytes(tag), bytes(value)) for tag, value in pairs)
    if len(set(ordered)) != len(ordered):
        raise InvalidArgument("two extra pairs of one block are equal; give each once")
    return b"".join(struct.pack("<I", len(tag)) + tag + struct.pack("<I", len(value)) + value for tag, value in ordered)
