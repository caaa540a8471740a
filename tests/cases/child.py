"""A client process of its own: reads one command a line, does it with a KVClient, and answers one line. Started by `children.Child`."""

from __future__ import annotations

import json
import random
import sys
import time
from contextlib import ExitStack

from kvstore import errors
from kvstore.clients.client import KVClient
from kvstore.clients.lease import Lease
from kvstore.clients.put import Put
from tests.blocks import GEOMETRY, IDENTITY, chain, each_hash, pattern, right, tokens_of


class Program:
    """Its public methods are the commands. At most one lease and one put are open at a time."""

    def __init__(self, address: str) -> None:
        self.client = KVClient(address, name="child")
        self.namespace = self.client.open_namespace(IDENTITY, GEOMETRY)
        self.open = ExitStack()
        self.hashes = b""
        self.lease: Lease | None = None
        self.filling: Put | None = None

    def put(self, seed: int, blocks: int) -> list[str]:
        """Store a chain; the outcome of each block."""
        with self.client.put(self.namespace, chain(seed, blocks)) as put:
            for block in put.blocks:
                block.write(pattern(block.hash))
        return list(put.names)

    def reserve(self, seed: int, blocks: int) -> list[str]:
        """Take slots for a chain and fill them, without a commit."""
        self.filling = self.open.enter_context(self.client.put(self.namespace, chain(seed, blocks)))
        for block in self.filling.blocks:
            block.write(pattern(block.hash))
        return list(self.filling.names)

    def commit(self) -> list[str]:
        """Commit what `reserve` took."""
        if self.filling is None:
            raise errors.InvalidArgument("reserve first")
        self.open.close()
        return list(self.filling.names)

    def scribble(self, byte: int) -> int:
        """Overwrite what `reserve` took, however late; how many blocks."""
        if self.filling is None:
            raise errors.InvalidArgument("reserve first")
        for block in self.filling.blocks:
            block.view[:] = byte
        return len(self.filling.blocks)

    def hold(self, seed: int, blocks: int) -> int:
        """Take a lease and keep it; how many blocks it has."""
        self.hashes = chain(seed, blocks)
        self.lease = self.open.enter_context(self.client.get(self.namespace, self.hashes))
        return self.lease.blocks

    def right(self) -> bool:
        """Whether the lease's bytes are those of its blocks. Raises what the lease raises where it is over."""
        if self.lease is None:
            raise errors.InvalidArgument("hold first")
        return right(self.lease.views, self.hashes)

    def peek(self) -> bool:
        """The same, whatever became of the session: nobody may write over memory that is still in its hands."""
        if self.lease is None:
            raise errors.InvalidArgument("hold first")
        return right(self.lease._views, self.hashes)

    def let_go(self) -> None:
        """Give back what is held."""
        self.open.close()

    def prompt(self, seed: int, blocks: int) -> int:
        """How many blocks of a prompt, given by its tokens, are here."""
        return self.client.lookup(self.namespace, tokens=tokens_of(seed, blocks)).blocks

    def lookup(self, seed: int, blocks: int) -> int:
        """How many leading blocks of a chain are here."""
        return self.client.lookup(self.namespace, chain(seed, blocks)).blocks

    def work(self, number: int, seeds: int, seconds: float, least: int = 0) -> dict[str, int]:
        """Store and read chains at random for so long, and until so many blocks of each. Counts what was read, and what of it was wrong."""
        chance = random.Random(number)
        counts = {"stored": 0, "read": 0, "wrong": 0}
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at or min(counts["stored"], counts["read"]) < least:
            hashes = chain(chance.randrange(seeds), chance.randint(1, 12))
            with self.client.get(self.namespace, hashes) as lease:
                counts["read"] += lease.blocks
                counts["wrong"] += sum(not right([view], key) for view, key in zip(lease.views, each_hash(hashes), strict=False))
            with self.client.put(self.namespace, hashes) as put:
                for block in put.blocks:
                    block.write(pattern(block.hash))
            counts["stored"] += put.names.count("stored")
        return counts


def main() -> None:
    program = Program(sys.argv[1])
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"value": getattr(program, name)(*arguments)}
        except errors.KVStoreError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
