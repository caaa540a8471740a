"""Opens the store that a worker decodes out of: the daemon's, or one of its own where there is none."""

from dataclasses import dataclass

from kvstore.clients.blocks import BlockStore
from kvstore.clients.client import KVClient
from kvstore.errors import Unavailable
from kvstore.worker.model import BLOCK_TOKENS, LoadedModel
from kvstore.worker.pool import AHEAD_BLOCKS
from kvstore.worker.standalone import StandaloneStore


@dataclass(frozen=True)
class Opened:
    """`why_alone` says why the store is this process's own; "" where it is the daemon's, or was asked to be."""

    store: BlockStore
    shared: bool
    why_alone: str = ""


@dataclass(frozen=True)
class Portion:
    """How much of the daemon's memory a worker may count on.

    guarantee_bytes   that other sessions cannot take from it      limit_bytes   the most that it may hold; 0: no limit
    block_tokens      tokens of a block: workers share only blocks of the same size
    tails             find prefixes to the token, not only to the block (docs/tails.md)
    """

    guarantee_bytes: int = 0
    limit_bytes: int = 0
    block_tokens: int = BLOCK_TOKENS
    tails: bool = False


NO_PORTION = Portion()


def open_alone(loaded: LoadedModel, tokens: int) -> BlockStore:
    """A store of this process with room for one sequence of so many tokens."""
    geometry = loaded.geometry()
    blocks = -(-tokens // geometry.block_tokens) + 2 * AHEAD_BLOCKS
    return StandaloneStore(loaded.identity, geometry, blocks * geometry.slot_bytes)


def open_shared(loaded: LoadedModel, address: str | None, name: str = "", portion: Portion = NO_PORTION) -> BlockStore:
    """The daemon's store; `address` None takes the usual socket.

    Raises Unavailable where nobody serves it, ResourceExhausted where the daemon has promised others too much to guarantee the portion.
    """
    with KVClient(address, name=name, guarantee_bytes=portion.guarantee_bytes, limit_bytes=portion.limit_bytes) as client:
        return client.open_blocks(loaded.identity, loaded.geometry(portion.block_tokens), tails=portion.tails)


def open_either(loaded: LoadedModel, address: str | None, tokens: int) -> Opened:
    """The daemon's store, or one of this process where no daemon answers: a worker works without one."""
    try:
        return Opened(open_shared(loaded, address), shared=True)
    except Unavailable as error:
        return Opened(open_alone(loaded, tokens), shared=False, why_alone=str(error))
