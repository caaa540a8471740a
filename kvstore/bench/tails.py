"""`kvstore bench tails`: how many more of a conversation load's tokens are found with partial tails, and what that costs the event loop.

The load is made up: some system prompts that conversations share, messages between fixed marks, answers, and now and then a message that is
edited or asked for again. It goes through the real cache core, without bytes, once with tails and once with whole blocks alone; beside them
the longest beginning that any earlier sequence had, which is what a radix tree over single tokens that keeps everything would find.
"""

from __future__ import annotations

import argparse
import bisect
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.core import Cache
from kvstore.cache.messages import (
    ALL_BLOCKS,
    UNIT_BYTES,
    Abandon,
    Acquire,
    Acquired,
    Attach,
    Commit,
    NamespaceSpec,
    Prompt,
    Release,
    Reserve,
    Reserved,
    unpack_hashes,
)
from kvstore.cache.state import CacheSizes
from kvstore.hashing import block_hashes, usable_blocks

NAME = "tails"
HELP = "Tokens found with partial tails and without, on a made-up conversation load, and what it costs."

SIZES = (16, 32, 64, 128, 256)  # tokens a block
REQUESTS = 2000  # requests: enough that every system prompt is well known
SYSTEMS = 12  # system prompts
LONGEST_TOKENS = 8192  # tokens: a conversation ends there
VOCABULARY = 50_000  # token ids
NEW, EDITED = 0.35, 0.2  # share of requests: a conversation's first; its last message changed in the middle
MARKS = ([1, 2, 3], [4, 5])  # token ids: before and after every message
ROOT = bytes(32)

Tokens = NDArray[np.uint32]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")
    parser.add_argument("--requests", metavar="N", type=int, default=REQUESTS, help=f"how many requests (default: {REQUESTS})")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="another seed makes another load")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON. Returns 0."""
    load = list(conversations(args.requests, args.seed))
    figures: dict[str, Any] = {"requests": len(load), "prompt_tokens": sum(len(prompt) for prompt, _ in load), "by_block_tokens": {}}
    figures["longest_known_tokens"] = longest_known(load)
    for size in SIZES:
        plain, tails = (Measured(size, tails, load) for tails in (False, True))
        figures["by_block_tokens"][size] = {
            "whole_block_tokens": plain.hit_tokens,
            "with_tails_tokens": tails.hit_tokens,
            "requests_with_a_tail": tails.tails,
            "id_bytes_per_block": round(tails.id_bytes / max(1, tails.blocks)),
            "acquire_us": round(plain.median_us("acquire"), 1),
            "acquire_with_tails_us": round(tails.median_us("acquire"), 1),
            "commit_us": round(plain.median_us("commit"), 1),
            "commit_with_tails_us": round(tails.median_us("commit"), 1),
        }
    show(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def conversations(requests: int, seed: int) -> Iterator[tuple[Tokens, Tokens]]:
    """(prompt, prompt and answer) of each request, in order."""
    rng = np.random.default_rng(seed)

    def words(median: int) -> list[int]:
        length = int(np.clip(rng.lognormal(np.log(median), 0.8), 1, 2000))
        ids: list[int] = (10 + rng.zipf(1.3, length) % VOCABULARY).tolist()  # the usual words come often, first ones too
        return ids

    def message(median: int) -> list[int]:
        return [*MARKS[0], *words(median), *MARKS[1]]

    systems = [message(400) for _ in range(SYSTEMS)]
    running: list[tuple[list[int], list[int]]] = []  # what came before the last message, and that message
    for _ in range(requests):
        chance = rng.random()
        if not running or chance < NEW:
            before, last = systems[min(SYSTEMS, int(rng.zipf(1.5))) - 1], message(60)
        else:
            before, last = running[int(rng.integers(max(0, len(running) - 40), len(running)))]
            if chance < NEW + EDITED:
                kept = int(rng.integers(len(MARKS[0]), len(last)))
                last = [*last[:kept], *words(20), *MARKS[1]]
            else:
                before, last = [*before, *last, *message(150)], message(60)
        prompt = [*before, *last]
        if len(prompt) > LONGEST_TOKENS:
            before, last = systems[0], message(60)
            prompt = [*before, *last]
        running.append((before, last))
        yield np.array(prompt, np.uint32), np.array([*prompt, *message(150)], np.uint32)


def longest_known(load: list[tuple[Tokens, Tokens]]) -> int:
    """Tokens of the prompts, but each one's last, that begin some earlier sequence just so."""
    known: list[bytes] = []  # in order: whoever shares the longest beginning is a neighbour
    total = 0
    for prompt, sequence in load:
        asked = prompt[:-1]
        at = bisect.bisect(known, asked.astype(">u4").tobytes())
        near = [np.frombuffer(each, ">u4") for each in known[max(0, at - 1) : at + 1]]
        total += max((_common(asked, each) for each in near), default=0)
        bisect.insort(known, sequence.astype(">u4").tobytes())
    return total


def _common(one: NDArray[Any], other: NDArray[Any]) -> int:
    shorter = min(len(one), len(other))
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if differs.size else shorter


@dataclass
class Measured:
    """The load, sent through a cache that keeps all of it."""

    size: int
    keeps_ids: bool
    load: list[tuple[Tokens, Tokens]]
    hit_tokens: int = 0
    tails: int = 0
    blocks: int = 0
    id_bytes: int = 0
    took_s: dict[str, list[float]] = field(default_factory=lambda: {"acquire": [], "commit": []})

    def __post_init__(self) -> None:
        blocks = sum(len(sequence) // self.size for _, sequence in self.load) + 1
        cache = Cache(CacheSizes(blocks * UNIT_BYTES, dram_extent_bytes=blocks * UNIT_BYTES, index_blocks=2 * blocks))
        cache.open_namespace(NamespaceSpec("bench", bytes(32), 1, UNIT_BYTES, ALL_BLOCKS, self.size, self.keeps_ids))
        cache.attach(Attach(1, "bench"), 0.0)
        leases = count(1)
        for prompt, sequence in self.load:
            self._request(cache, next(leases), prompt, sequence)
        stats = cache.stats()
        self.blocks, self.id_bytes = stats.tail_blocks, stats.tail_bytes

    def _request(self, cache: Cache, lease: int, prompt: Tokens, sequence: Tokens) -> None:
        hashes = unpack_hashes(block_hashes(ROOT, sequence, self.size))
        usable = usable_blocks(len(prompt), self.size)
        asked = Prompt(ROOT, prompt) if self.keeps_ids else None
        began = time.perf_counter()
        answer = cache.acquire(Acquire(1, lease, hashes[:usable], 1.0, 1, prompt=asked), 0.0)
        self.took_s["acquire"].append(time.perf_counter() - began)
        if not isinstance(answer, Acquired):
            raise RuntimeError(answer.text)
        whole = answer.expected - (answer.tail_tokens > 0)
        self.hit_tokens += whole * self.size + answer.tail_tokens
        self.tails += answer.tail_tokens > 0
        cache.drain()
        cache.release(Release(1, lease))
        parent = hashes[whole - 1 : whole] if whole else unpack_hashes(ROOT)
        self._commit(cache, lease, hashes[whole:], parent, sequence[whole * self.size :])

    def _commit(self, cache: Cache, lease: int, hashes: NDArray[np.uint64], parent: NDArray[np.uint64], tokens: Tokens) -> None:
        if not len(hashes):
            return
        slots = cache.reserve(Reserve(1, 1, 1, len(hashes)))
        if not isinstance(slots, Reserved):
            raise RuntimeError(slots.text)
        ids = tokens[: len(hashes) * self.size] if self.keeps_ids else None
        began = time.perf_counter()
        cache.commit(Commit(1, lease, 1, slots.units, slots.generations, hashes, parent, tokens=ids))
        self.took_s["commit"].append(time.perf_counter() - began)
        cache.drain()
        cache.release(Release(1, lease))
        cache.abandon(Abandon(1, 1))

    def median_us(self, what: str) -> float:
        return float(np.median(self.took_s[what])) * 1e6


def show(figures: dict[str, Any]) -> None:
    """Print the table."""
    requests, total = figures["requests"], figures["prompt_tokens"]
    known = figures["longest_known_tokens"]
    print(f"{requests} requests of {total // requests} tokens on average; of these {known / total:.1%} began an earlier sequence just so\n")
    heads = f"{'block':>6}  {'whole blocks':>12}  {'with tails':>10}  {'more, tokens a request':>22}  {'bytes a block':>13}"
    print(f"{heads}  acquire us    commit us")
    for size, row in figures["by_block_tokens"].items():
        more = (row["with_tails_tokens"] - row["whole_block_tokens"]) / requests
        print(
            f"{size:>6}  {row['whole_block_tokens'] / total:>12.1%}  {row['with_tails_tokens'] / total:>10.1%}  {more:>22.1f}"
            f"  {row['id_bytes_per_block']:>13}  {row['acquire_us']:.0f} -> {row['acquire_with_tails_us']:.0f}"
            f"    {row['commit_us']:.0f} -> {row['commit_with_tails_us']:.0f}"
        )
