"""What the scheduler's half of the vLLM connector tells the workers' half each step, and what comes back. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

NO_BLOCK = -1  # in the place of an engine block's id: the engine keeps none there, the window has left it behind


@dataclass(frozen=True)
class GroupFacts:
    """What one worker's tensors of one KV cache group are: blocks are shared between workers for which all of this is equal.

    format         names the engine, its attention backend, the instruction set that it packs for, and the layout
    block_bytes    of one block over the group's layers of this worker;  layers, kv_heads, head_items  counts of this worker
    dtype          torch's name of the elements' type
    name           tells the groups of a model apart; "" where there is one
    window_tokens  that its layers look back; 0: they see all
    """

    format: str
    block_bytes: int
    block_tokens: int
    layers: int
    kv_heads: int
    head_items: int
    dtype: str
    name: str = ""
    window_tokens: int = 0

    @property
    def window_blocks(self) -> int:
        """Blocks that the window may reach into from a block's end; 0: all."""
        return -(-self.window_tokens // self.block_tokens)


@dataclass
class WorkerFacts(KVConnectorHandshakeMetadata):
    """What one worker holds.

    groups    one for each KV cache group of the engine, in its order
    shard     "" where all ranks hold the same bytes
    refusal   why this worker cannot take part; "" where it can
    """

    groups: tuple[GroupFacts, ...] = ()
    shard: str = ""
    refusal: str = ""

    @property
    def has_windows(self) -> bool:
        """Whether some layers see a part of the tokens only."""
        return any(group.window_tokens for group in self.groups)

    @property
    def fails_whole(self) -> bool:
        """A load that fails in part has failed: nothing says from where on its request could be computed."""
        return len(self.groups) > 1 or self.has_windows


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

    units      one tuple a member of the store's group (see `StepPlan.shards`): the slot of each block, in 4 KiB units of the arena
    block_ids  by KV cache group: where each goes in the engine, in the same order; NO_BLOCK where the engine wants none
    """

    request: str
    arena: ArenaPlace
    units: tuple[tuple[int, ...], ...]
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SaveJob:
    """Store engine blocks under their hashes: consecutive blocks of one chain, `hashes` 32 bytes each.

    group    the KV cache group
    number   not 0: the scheduler keeps the blocks until every worker says that it needs them no more
    """

    request: str
    hashes: bytes
    parent: bytes
    block_ids: tuple[int, ...]
    group: int = 0
    number: int = 0


@dataclass
class Freed(KVConnectorWorkerMetadata):
    """Numbers of the SaveJobs whose blocks are needed no more, and by how many workers."""

    workers: dict[int, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Those of two workers together."""
        assert isinstance(other, Freed)
        numbers = self.workers.keys() | other.workers.keys()
        return Freed({number: self.workers.get(number, 0) + other.workers.get(number, 0) for number in numbers})


@dataclass
class StepPlan(KVConnectorMetadata):
    """One step. `number` rises by one a step.

    shards    in the order that the loads' slots have: of each shard every KV cache group, then of the next
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
