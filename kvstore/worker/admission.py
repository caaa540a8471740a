"""The requests that wait: pulls what the store has of those that are next, and admits them when there is room.

A prompt whose next block another sequence is computing right now waits for it: two workers of one store may compute the same block,
one worker never does it twice.

There is room for a request when what runs, what has been promised to it, and the request's own blocks fit. One that was stopped comes
back only where in addition all can run for a time slice: else sequences would be loaded from the disk to be stopped at once. Its pull
begins at that same moment, while others compute.
"""

import bisect
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from kvstore.hashing import HASH_BYTES, block_hashes, usable_blocks
from kvstore.worker.branch import Branch
from kvstore.worker.costs import Costs
from kvstore.worker.paged import PagedCache
from kvstore.worker.pulls import Pulled
from kvstore.worker.scheduler import Room, Rules, order, slice_blocks
from kvstore.worker.streams import Streams

PULLS_AHEAD = 4  # waiting requests whose blocks are brought up before their turn


class Admission:
    """`waiting` is in no order; `look` sorts it."""

    def __init__(self, cache: PagedCache, rules: Rules, costs: Costs, room: Room, streams: Streams) -> None:
        self.waiting: list[Branch] = []
        self._cache, self._rules, self._costs, self._room, self._streams = cache, rules, costs, room, streams
        self._size = cache.layout.tokens

    def look(self, running: Sequence[Branch], now: float) -> Iterator[Branch]:
        """Those that run from now on, each with its sequence; each is put into `running` before the next is asked for."""
        if not self.waiting:
            return
        for branch in self.waiting:
            branch.hot_tokens = self._hot_tokens(branch)
        self.waiting = order(self.waiting, now, self._rules)
        self._pull(running, now)
        yield from self._admit(running, now)

    def under_way(self) -> list[Future[Pulled]]:
        """Pulls that are not done."""
        return [branch.pull for branch in self.waiting if branch.pull is not None and not branch.pull.done()]

    def pulled_blocks(self) -> int:
        """Blocks that pulls have brought for those that wait."""
        return sum(len(each.pull.result().units) for each in self.waiting if each.pull is not None and each.pull.done())

    def drop_one_pull(self) -> bool:
        """Give back what the last of those that wait has been brought; whether there was any."""
        for branch in reversed(self.waiting):
            if branch.pull is not None:
                self._drop(branch)
                return True
        return False

    def forget(self, branch: Branch) -> None:
        """A branch has ended."""
        self._drop(branch)
        if branch in self.waiting:
            self.waiting.remove(branch)

    def close(self) -> None:
        """Forget all that wait."""
        for branch in list(self.waiting):
            self.forget(branch)

    def _hot_tokens(self, branch: Branch) -> int:
        """Leading tokens that the store has: as its pull found, or else, where many wait, as far as this worker committed them itself."""
        if branch.pull is not None and branch.pull.done():
            return len(branch.pull.result().units) * self._size
        if len(self.waiting) <= PULLS_AHEAD or branch.is_stream:
            return branch.hot_tokens
        if branch.hashes is None:
            branch.hashes = block_hashes(branch.job.root, branch.job.request.tokens, self._size)
        hashes, committed = branch.hashes, self._cache.committed
        blocks = usable_blocks(len(branch.job.request.tokens), self._size)
        # Blocks leave a chain from its end, so the first that is missing can be searched by halves.
        missing = bisect.bisect_left(range(blocks), 1, key=lambda at: hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES] not in committed)
        return missing * self._size

    def _pull(self, running: Sequence[Branch], now: float) -> None:
        """Begin the pulls of those that are next, as far as there is room for what they bring."""
        promised = self._promised(running)
        ahead = [each for each in self.waiting if self._may_begin(each, running)][:PULLS_AHEAD]
        for at, branch in enumerate(ahead):
            usable = self._streams.blocks(branch) if branch.is_stream else usable_blocks(len(branch.tokens), self._size)
            promised += usable
            kept_free = self._kept_free(branch, [*running, *ahead[:at]])
            first = not running and not at
            if promised + kept_free > self._room.blocks and not first:
                break  # what becomes free is for this one
            if branch.pull is None and branch.not_before <= now and not branch.is_stream:
                tokens = branch.tokens
                limit_s = min(self._costs.load_limit_s(usable * self._size), self._cache.acquire_timeout_s)
                branch.pull = self._cache.pull(tokens, branch.job.root, limit_s)
                self._cache.pool.prepare()

    def _admit(self, running: Sequence[Branch], now: float) -> Iterator[Branch]:
        """Whoever is admitted is to be in `running` before the next one is opened: if that fails, none is lost."""
        seats = self._rules.running - sum(branch.seats for branch in running)
        to_come = _hashes_to_come(running)
        under_way = 0  # blocks of those whose turn it is before others', and whose pull is not done
        for branch in list(self.waiting):
            if branch.seats > seats:
                break
            if not self._may_begin(branch, running):
                continue
            if branch.is_stream:
                if branch.not_before > now:
                    break
                new_blocks = self._streams.blocks(branch)
            elif branch.pull is None:
                break  # no room for it yet, or for those before it: nobody behind it takes what becomes free
            elif not branch.pull.done():
                under_way += len(branch.tokens) // self._size + 1
                continue
            elif self._may_hit_more(branch, branch.pull.result(), to_come):
                continue
            else:
                new_blocks = self._new_blocks(branch, branch.pull.result())
            needed = self._promised(running) + under_way + new_blocks + self._kept_free(branch, running)
            if running and needed > self._room.blocks:
                break
            self._open(branch)
            seats -= branch.seats
            to_come |= _hashes_to_come([branch])
            yield branch

    def _may_begin(self, branch: Branch, running: Sequence[Branch]) -> bool:
        """False for a stream that has to wait for other streams' ends; those behind it need not."""
        return not branch.is_stream or self._streams.fits(branch, running)

    def _promised(self, running: Sequence[Branch]) -> int:
        """Blocks that those that run hold, and those that they need for the tokens that are known."""
        missing = sum(each.sequence.blocks_missing for each in running if each.sequence is not None)
        return self._cache.held_blocks + missing + sum(2 * (each.seats - 1) for each in running)

    def _kept_free(self, branch: Branch, beside: Sequence[Branch]) -> int:
        """Blocks more that must be free before this one may come back beside those."""
        if not branch.job.started or (branch.job.search and any(each.job is branch.job for each in beside)):  # beams come back together
            return 0
        return sum(each.seats * slice_blocks(each.tokens_to_make, self._size) for each in [branch, *beside])

    def _may_hit_more(self, branch: Branch, pulled: Pulled, to_come: set[bytes]) -> bool:
        """Whether the next block that a pull did not bring is on its way, or has come since; then the pull is made anew."""
        at = len(pulled.units)
        if pulled.fault is not None or at >= usable_blocks(len(branch.tokens), self._size):
            return False
        missing = pulled.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]
        if missing in to_come:
            return True
        if missing not in self._cache.committed or missing == branch.asked_again:
            return False
        branch.asked_again = missing
        self._drop(branch)
        return True

    def _new_blocks(self, branch: Branch, pulled: Pulled) -> int:
        """Blocks that the branch would add to those held, with one for its first token and two for each further sample."""
        blocks = len(branch.tokens) // self._size + 1
        return blocks - self._cache.known_blocks(pulled) + 2 * (branch.seats - 1)

    def _open(self, branch: Branch) -> None:
        pull, branch.pull = branch.pull, None
        if branch.is_stream:
            branch.sequence = self._streams.open(branch)
            self.waiting.remove(branch)
            return
        branch.sequence = self._cache.open(branch.tokens, branch.job.root, pull)
        self.waiting.remove(branch)
        self._costs.loaded(branch.sequence.hit_tokens // self._size, branch.sequence.acquire_s)

    def _drop(self, branch: Branch) -> None:
        if branch.pull is not None:
            pull, branch.pull = branch.pull, None
            self._cache.pulls.drop(pull)


def _hashes_to_come(running: Sequence[Branch]) -> set[bytes]:
    """Hashes of the full blocks of prompts that are being computed."""
    found: set[bytes] = set()
    for branch in running:
        if branch.sequence is not None and branch.tokens_to_come > 1:
            found |= branch.sequence.hashes_to_come()
    return found
