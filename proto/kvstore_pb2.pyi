from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Geometry(_message.Message):
    __slots__ = ("kind", "layers", "kv_heads", "key_dim", "value_dim", "latent_dim", "rope_dim", "dtype", "block_tokens", "format", "opaque_block_bytes", "quant")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    KEY_DIM_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIM_FIELD_NUMBER: _ClassVar[int]
    LATENT_DIM_FIELD_NUMBER: _ClassVar[int]
    ROPE_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUANT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    latent_dim: int
    rope_dim: int
    dtype: str
    block_tokens: int
    format: str
    opaque_block_bytes: int
    quant: Quant
    def __init__(self, kind: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., key_dim: _Optional[int] = ..., value_dim: _Optional[int] = ..., latent_dim: _Optional[int] = ..., rope_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., block_tokens: _Optional[int] = ..., format: _Optional[str] = ..., opaque_block_bytes: _Optional[int] = ..., quant: _Optional[_Union[Quant, _Mapping]] = ...) -> None: ...

class Quant(_message.Message):
    __slots__ = ("scheme", "granularity", "scale_dtype")
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    GRANULARITY_FIELD_NUMBER: _ClassVar[int]
    SCALE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    scheme: str
    granularity: str
    scale_dtype: str
    def __init__(self, scheme: _Optional[str] = ..., granularity: _Optional[str] = ..., scale_dtype: _Optional[str] = ...) -> None: ...

class Keep(_message.Message):
    __slots__ = ("kind", "window_tokens")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    window_tokens: int
    def __init__(self, kind: _Optional[str] = ..., window_tokens: _Optional[int] = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("facts", "geometry", "shard", "kv_group", "keep", "tails")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    FACTS_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    KV_GROUP_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    TAILS_FIELD_NUMBER: _ClassVar[int]
    facts: _containers.ScalarMap[str, str]
    geometry: Geometry
    shard: str
    kv_group: str
    keep: Keep
    tails: bool
    def __init__(self, facts: _Optional[_Mapping[str, str]] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., shard: _Optional[str] = ..., kv_group: _Optional[str] = ..., keep: _Optional[_Union[Keep, _Mapping]] = ..., tails: _Optional[bool] = ...) -> None: ...

class OpenNamespaceReply(_message.Message):
    __slots__ = ("epoch", "namespace_id", "digest", "slot_bytes", "block_bytes", "tails")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TAILS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    namespace_id: int
    digest: bytes
    slot_bytes: int
    block_bytes: int
    tails: bool
    def __init__(self, epoch: _Optional[str] = ..., namespace_id: _Optional[int] = ..., digest: _Optional[bytes] = ..., slot_bytes: _Optional[int] = ..., block_bytes: _Optional[int] = ..., tails: _Optional[bool] = ...) -> None: ...

class JoinGroupRequest(_message.Message):
    __slots__ = ("session", "group", "namespace_ids", "epoch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session: int
    group: str
    namespace_ids: _containers.RepeatedScalarFieldContainer[int]
    epoch: str
    def __init__(self, session: _Optional[int] = ..., group: _Optional[str] = ..., namespace_ids: _Optional[_Iterable[int]] = ..., epoch: _Optional[str] = ...) -> None: ...

class JoinGroupReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    def __init__(self, epoch: _Optional[str] = ...) -> None: ...

class ClientMessage(_message.Message):
    __slots__ = ("hello", "locked", "batch", "detach")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOCKED_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    locked: Locked
    batch: Batch
    detach: Detach
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., locked: _Optional[_Union[Locked, _Mapping]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., detach: _Optional[_Union[Detach, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("client", "guarantee_bytes", "limit_bytes", "resume_session", "resume_token", "maps_arena", "pools")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    GUARANTEE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESUME_SESSION_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MAPS_ARENA_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    client: str
    guarantee_bytes: int
    limit_bytes: int
    resume_session: int
    resume_token: bytes
    maps_arena: bool
    pools: _containers.RepeatedCompositeFieldContainer[PoolTerms]
    def __init__(self, client: _Optional[str] = ..., guarantee_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., resume_session: _Optional[int] = ..., resume_token: _Optional[bytes] = ..., maps_arena: _Optional[bool] = ..., pools: _Optional[_Iterable[_Union[PoolTerms, _Mapping]]] = ...) -> None: ...

class PoolTerms(_message.Message):
    __slots__ = ("uuid", "guarantee_bytes", "limit_bytes")
    UUID_FIELD_NUMBER: _ClassVar[int]
    GUARANTEE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    guarantee_bytes: int
    limit_bytes: int
    def __init__(self, uuid: _Optional[str] = ..., guarantee_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ...) -> None: ...

class Locked(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Detach(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Batch(_message.Message):
    __slots__ = ("number", "ops")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    number: int
    ops: _containers.RepeatedCompositeFieldContainer[Op]
    def __init__(self, number: _Optional[int] = ..., ops: _Optional[_Iterable[_Union[Op, _Mapping]]] = ...) -> None: ...

class Op(_message.Message):
    __slots__ = ("acquire", "claim", "reserve", "commit", "abandon", "release", "reserve_each", "commit_each", "release_each", "pool")
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABANDON_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_EACH_FIELD_NUMBER: _ClassVar[int]
    COMMIT_EACH_FIELD_NUMBER: _ClassVar[int]
    RELEASE_EACH_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    acquire: Acquire
    claim: Claim
    reserve: Reserve
    commit: Commit
    abandon: Abandon
    release: Release
    reserve_each: ReserveEach
    commit_each: CommitEach
    release_each: ReleaseEach
    pool: int
    def __init__(self, acquire: _Optional[_Union[Acquire, _Mapping]] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abandon: _Optional[_Union[Abandon, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., reserve_each: _Optional[_Union[ReserveEach, _Mapping]] = ..., commit_each: _Optional[_Union[CommitEach, _Mapping]] = ..., release_each: _Optional[_Union[ReleaseEach, _Mapping]] = ..., pool: _Optional[int] = ...) -> None: ...

class Acquire(_message.Message):
    __slots__ = ("lease", "namespace_id", "group", "hashes", "timeout_s", "token_ids", "root")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    lease: int
    namespace_id: int
    group: str
    hashes: bytes
    timeout_s: float
    token_ids: bytes
    root: bytes
    def __init__(self, lease: _Optional[int] = ..., namespace_id: _Optional[int] = ..., group: _Optional[str] = ..., hashes: _Optional[bytes] = ..., timeout_s: _Optional[float] = ..., token_ids: _Optional[bytes] = ..., root: _Optional[bytes] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("lease", "group", "namespace_id")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    lease: int
    group: str
    namespace_id: int
    def __init__(self, lease: _Optional[int] = ..., group: _Optional[str] = ..., namespace_id: _Optional[int] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("reservation", "namespace_id", "count", "hashes")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    reservation: int
    namespace_id: int
    count: int
    hashes: bytes
    def __init__(self, reservation: _Optional[int] = ..., namespace_id: _Optional[int] = ..., count: _Optional[int] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("lease", "namespace_id", "units", "generations", "hashes", "parents", "checksums", "token_ids")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    lease: int
    namespace_id: int
    units: bytes
    generations: bytes
    hashes: bytes
    parents: bytes
    checksums: bytes
    token_ids: bytes
    def __init__(self, lease: _Optional[int] = ..., namespace_id: _Optional[int] = ..., units: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class Abandon(_message.Message):
    __slots__ = ("reservation", "units", "generations")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    reservation: int
    units: bytes
    generations: bytes
    def __init__(self, reservation: _Optional[int] = ..., units: _Optional[bytes] = ..., generations: _Optional[bytes] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("lease", "keep_blocks")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    KEEP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease: int
    keep_blocks: int
    def __init__(self, lease: _Optional[int] = ..., keep_blocks: _Optional[int] = ...) -> None: ...

class ReserveEach(_message.Message):
    __slots__ = ("reservations", "namespace_id")
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    reservations: bytes
    namespace_id: int
    def __init__(self, reservations: _Optional[bytes] = ..., namespace_id: _Optional[int] = ...) -> None: ...

class CommitEach(_message.Message):
    __slots__ = ("leases", "namespace_id", "units", "generations", "hashes", "parents")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    leases: bytes
    namespace_id: int
    units: bytes
    generations: bytes
    hashes: bytes
    parents: bytes
    def __init__(self, leases: _Optional[bytes] = ..., namespace_id: _Optional[int] = ..., units: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., parents: _Optional[bytes] = ...) -> None: ...

class ReleaseEach(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: bytes
    def __init__(self, leases: _Optional[bytes] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("epoch", "welcome", "ready", "reply", "grant", "ended")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    welcome: Welcome
    ready: Ready
    reply: BatchReply
    grant: Grant
    ended: Ended
    def __init__(self, epoch: _Optional[str] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., reply: _Optional[_Union[BatchReply, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session", "resume_token", "arena_path", "arena_bytes", "arena_header_bytes", "session_path", "pools", "each")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ARENA_PATH_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_HEADER_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_PATH_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    EACH_FIELD_NUMBER: _ClassVar[int]
    session: int
    resume_token: bytes
    arena_path: str
    arena_bytes: int
    arena_header_bytes: int
    session_path: str
    pools: _containers.RepeatedCompositeFieldContainer[PoolOffer]
    each: bool
    def __init__(self, session: _Optional[int] = ..., resume_token: _Optional[bytes] = ..., arena_path: _Optional[str] = ..., arena_bytes: _Optional[int] = ..., arena_header_bytes: _Optional[int] = ..., session_path: _Optional[str] = ..., pools: _Optional[_Iterable[_Union[PoolOffer, _Mapping]]] = ..., each: _Optional[bool] = ...) -> None: ...

class PoolOffer(_message.Message):
    __slots__ = ("pool", "uuid", "socket_path", "bytes")
    POOL_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    pool: int
    uuid: str
    socket_path: str
    bytes: int
    def __init__(self, pool: _Optional[int] = ..., uuid: _Optional[str] = ..., socket_path: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BatchReply(_message.Message):
    __slots__ = ("number", "replies", "first_op", "grants")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    FIRST_OP_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    number: int
    replies: _containers.RepeatedCompositeFieldContainer[OpReply]
    first_op: int
    grants: _containers.RepeatedCompositeFieldContainer[Grant]
    def __init__(self, number: _Optional[int] = ..., replies: _Optional[_Iterable[_Union[OpReply, _Mapping]]] = ..., first_op: _Optional[int] = ..., grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ...) -> None: ...

class OpReply(_message.Message):
    __slots__ = ("acquired", "slots", "done", "error", "each")
    ACQUIRED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    EACH_FIELD_NUMBER: _ClassVar[int]
    acquired: Acquired
    slots: SlotReply
    done: Done
    error: Error
    each: EachReply
    def __init__(self, acquired: _Optional[_Union[Acquired, _Mapping]] = ..., slots: _Optional[_Union[SlotReply, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., each: _Optional[_Union[EachReply, _Mapping]] = ...) -> None: ...

class Acquired(_message.Message):
    __slots__ = ("lease", "expected_blocks", "reason", "tail_tokens")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TAIL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease: int
    expected_blocks: int
    reason: str
    tail_tokens: int
    def __init__(self, lease: _Optional[int] = ..., expected_blocks: _Optional[int] = ..., reason: _Optional[str] = ..., tail_tokens: _Optional[int] = ...) -> None: ...

class SlotReply(_message.Message):
    __slots__ = ("id", "outcomes", "units", "generations")
    ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    id: int
    outcomes: bytes
    units: bytes
    generations: bytes
    def __init__(self, id: _Optional[int] = ..., outcomes: _Optional[bytes] = ..., units: _Optional[bytes] = ..., generations: _Optional[bytes] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class EachReply(_message.Message):
    __slots__ = ("outcomes", "units", "generations", "counts", "replies")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    units: bytes
    generations: bytes
    counts: bytes
    replies: _containers.RepeatedCompositeFieldContainer[OpReply]
    def __init__(self, outcomes: _Optional[bytes] = ..., units: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., replies: _Optional[_Iterable[_Union[OpReply, _Mapping]]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "text")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    code: str
    text: str
    def __init__(self, code: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("lease", "first_block", "members", "units", "generations", "ended", "pool")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    lease: int
    first_block: int
    members: int
    units: bytes
    generations: bytes
    ended: str
    pool: int
    def __init__(self, lease: _Optional[int] = ..., first_block: _Optional[int] = ..., members: _Optional[int] = ..., units: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., ended: _Optional[str] = ..., pool: _Optional[int] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("code", "text")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    code: str
    text: str
    def __init__(self, code: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("namespace_id", "group", "hashes", "epoch")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    group: str
    hashes: bytes
    epoch: str
    def __init__(self, namespace_id: _Optional[int] = ..., group: _Optional[str] = ..., hashes: _Optional[bytes] = ..., epoch: _Optional[str] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("epoch", "blocks", "tiers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    blocks: int
    tiers: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, epoch: _Optional[str] = ..., blocks: _Optional[int] = ..., tiers: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("namespace_id", "hashes", "timeout_s", "epoch")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    hashes: bytes
    timeout_s: float
    epoch: str
    def __init__(self, namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ..., timeout_s: _Optional[float] = ..., epoch: _Optional[str] = ...) -> None: ...

class BlockBytes(_message.Message):
    __slots__ = ("namespace_id", "hash", "parent", "offset_bytes", "data", "last", "checksum", "epoch")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    hash: bytes
    parent: bytes
    offset_bytes: int
    data: bytes
    last: bool
    checksum: bytes
    epoch: str
    def __init__(self, namespace_id: _Optional[int] = ..., hash: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., offset_bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., last: _Optional[bool] = ..., checksum: _Optional[bytes] = ..., epoch: _Optional[str] = ...) -> None: ...

class WriteReply(_message.Message):
    __slots__ = ("epoch", "outcomes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    outcomes: bytes
    def __init__(self, epoch: _Optional[str] = ..., outcomes: _Optional[bytes] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("namespace_id", "hashes", "epoch")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    hashes: bytes
    epoch: str
    def __init__(self, namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ..., epoch: _Optional[str] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ("epoch", "started_blocks", "present_blocks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STARTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    started_blocks: int
    present_blocks: int
    def __init__(self, epoch: _Optional[str] = ..., started_blocks: _Optional[int] = ..., present_blocks: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("namespace_id", "hashes", "epoch")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    hashes: bytes
    epoch: str
    def __init__(self, namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ..., epoch: _Optional[str] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("epoch", "blocks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    blocks: int
    def __init__(self, epoch: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("namespace_id", "epoch")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    epoch: str
    def __init__(self, namespace_id: _Optional[int] = ..., epoch: _Optional[str] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ("epoch", "blocks", "dram_bytes", "nvme_bytes", "held_blocks", "hbm_bytes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HBM_BYTES_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    blocks: int
    dram_bytes: int
    nvme_bytes: int
    held_blocks: int
    hbm_bytes: int
    def __init__(self, epoch: _Optional[str] = ..., blocks: _Optional[int] = ..., dram_bytes: _Optional[int] = ..., nvme_bytes: _Optional[int] = ..., held_blocks: _Optional[int] = ..., hbm_bytes: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "class_bytes", "blocks", "held_bytes", "health", "health_reason")
    class ClassBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLASS_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    HEALTH_REASON_FIELD_NUMBER: _ClassVar[int]
    tier: str
    capacity_bytes: int
    class_bytes: _containers.ScalarMap[str, int]
    blocks: int
    held_bytes: int
    health: str
    health_reason: str
    def __init__(self, tier: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., class_bytes: _Optional[_Mapping[str, int]] = ..., blocks: _Optional[int] = ..., held_bytes: _Optional[int] = ..., health: _Optional[str] = ..., health_reason: _Optional[str] = ...) -> None: ...

class SessionStats(_message.Message):
    __slots__ = ("session", "client", "tenant", "held_bytes", "leases", "reserved_slots", "ended", "hbm_held_bytes")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    HBM_HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    session: int
    client: str
    tenant: str
    held_bytes: int
    leases: int
    reserved_slots: int
    ended: bool
    hbm_held_bytes: int
    def __init__(self, session: _Optional[int] = ..., client: _Optional[str] = ..., tenant: _Optional[str] = ..., held_bytes: _Optional[int] = ..., leases: _Optional[int] = ..., reserved_slots: _Optional[int] = ..., ended: _Optional[bool] = ..., hbm_held_bytes: _Optional[int] = ...) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("epoch", "version", "uptime_s", "tiers", "sessions", "index_capacity_blocks", "index_used_blocks", "counters", "scrub_passes", "scrub_pass_s", "waiting_writes", "tail_blocks", "tail_bytes", "tail_capacity_bytes")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    INDEX_CAPACITY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INDEX_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    SCRUB_PASSES_FIELD_NUMBER: _ClassVar[int]
    SCRUB_PASS_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_WRITES_FIELD_NUMBER: _ClassVar[int]
    TAIL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TAIL_BYTES_FIELD_NUMBER: _ClassVar[int]
    TAIL_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    version: str
    uptime_s: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStats]
    index_capacity_blocks: int
    index_used_blocks: int
    counters: _containers.ScalarMap[str, int]
    scrub_passes: int
    scrub_pass_s: float
    waiting_writes: int
    tail_blocks: int
    tail_bytes: int
    tail_capacity_bytes: int
    def __init__(self, epoch: _Optional[str] = ..., version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStats, _Mapping]]] = ..., index_capacity_blocks: _Optional[int] = ..., index_used_blocks: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., scrub_passes: _Optional[int] = ..., scrub_pass_s: _Optional[float] = ..., waiting_writes: _Optional[int] = ..., tail_blocks: _Optional[int] = ..., tail_bytes: _Optional[int] = ..., tail_capacity_bytes: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("namespace_id", "epoch")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    epoch: str
    def __init__(self, namespace_id: _Optional[int] = ..., epoch: _Optional[str] = ...) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("epoch", "sequence", "kind", "namespace_id", "digest", "tier", "hashes", "parents")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    sequence: int
    kind: str
    namespace_id: int
    digest: bytes
    tier: str
    hashes: bytes
    parents: bytes
    def __init__(self, epoch: _Optional[str] = ..., sequence: _Optional[int] = ..., kind: _Optional[str] = ..., namespace_id: _Optional[int] = ..., digest: _Optional[bytes] = ..., tier: _Optional[str] = ..., hashes: _Optional[bytes] = ..., parents: _Optional[bytes] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ("epoch", "after")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    after: int
    def __init__(self, epoch: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class NamespaceStats(_message.Message):
    __slots__ = ("digest", "facts", "keep", "tails", "slot_bytes", "blocks")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class BlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    TAILS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    facts: _containers.ScalarMap[str, str]
    keep: Keep
    tails: bool
    slot_bytes: int
    blocks: _containers.ScalarMap[str, int]
    def __init__(self, digest: _Optional[bytes] = ..., facts: _Optional[_Mapping[str, str]] = ..., keep: _Optional[_Union[Keep, _Mapping]] = ..., tails: _Optional[bool] = ..., slot_bytes: _Optional[int] = ..., blocks: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ListNamespacesReply(_message.Message):
    __slots__ = ("epoch", "namespaces", "more_after")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    MORE_AFTER_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStats]
    more_after: int
    def __init__(self, epoch: _Optional[str] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStats, _Mapping]]] = ..., more_after: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("namespace_id", "epoch", "hashes", "token_ids", "adapter", "salt")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    epoch: str
    hashes: bytes
    token_ids: bytes
    adapter: str
    salt: str
    def __init__(self, namespace_id: _Optional[int] = ..., epoch: _Optional[str] = ..., hashes: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., adapter: _Optional[str] = ..., salt: _Optional[str] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("epoch", "asked_blocks", "blocks", "reason", "later_blocks", "elsewhere")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ASKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LATER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    asked_blocks: int
    blocks: int
    reason: str
    later_blocks: int
    elsewhere: _containers.RepeatedCompositeFieldContainer[Elsewhere]
    def __init__(self, epoch: _Optional[str] = ..., asked_blocks: _Optional[int] = ..., blocks: _Optional[int] = ..., reason: _Optional[str] = ..., later_blocks: _Optional[int] = ..., elsewhere: _Optional[_Iterable[_Union[Elsewhere, _Mapping]]] = ...) -> None: ...

class Elsewhere(_message.Message):
    __slots__ = ("digest", "blocks", "tokens", "differs")
    class DiffersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    blocks: int
    tokens: int
    differs: _containers.ScalarMap[str, str]
    def __init__(self, digest: _Optional[bytes] = ..., blocks: _Optional[int] = ..., tokens: _Optional[int] = ..., differs: _Optional[_Mapping[str, str]] = ...) -> None: ...
