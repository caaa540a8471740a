"""What the scheduler's half of the vLLM connector tells the workers' half each step, and what comes back. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata


@dataclass
class WorkerFacts(KVConnectorHandshakeMetadata):
    """What one worker's KV tensors are: blocks are shared between workers for which all of this is equal.

    format        names the engine, its attention backend, the instruction set that it packs for, and the layout
    block_bytes   of one block over all layers of this worker;  layers, kv_heads, head_items  counts of this worker
    dtype         torch's name of the elements' type
    shard         "" where all ranks hold the same bytes
    refusal       why this worker cannot take part; "" where it can
    """

    format: str = ""
    block_bytes: int = 0
    block_tokens: int = 0
    layers: int = 0
    kv_heads: int = 0
    head_items: int = 0
    dtype: str = ""
    shard: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class ArenaPlace:
    """Where slots lie: the arguments of `clients.arena.Arena`, and which file that is: another daemon may put another one there."""

    path: str
    header_bytes: int
    arena_bytes: int
    inode: tuple[int, ...]


@dataclass(frozen=True)
class LoadJob:
    """Copy leased slots into engine blocks.

    units      one tuple a member of the group: the slot of each block, in 4 KiB units of the arena
    block_ids  where each goes in the engine, in the same order
    """

    request: str
    arena: ArenaPlace
    units: tuple[tuple[int, ...], ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class SaveJob:
    """Store engine blocks under their hashes: consecutive blocks of one chain, `hashes` 32 bytes each."""

    request: str
    generation: str
    hashes: bytes
    parent: bytes
    block_ids: tuple[int, ...]


@dataclass
class StepPlan(KVConnectorMetadata):
    """One step. `number` rises by one a step.

    shards    the members of the group, in the order that the loads' slots have
    stop      requests whose blocks may be given to others in this step: their saves end first
    finished  requests whose blocks are kept until their saves are done, to be reported then
    idle      nothing is computed in this step, and something is awaited: the workers may wait a moment
    """

    number: int
    shards: tuple[str, ...] = ()
    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    stop: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    idle: bool = False
