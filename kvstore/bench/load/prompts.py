"""Requests made from a trace: its lengths scaled down, its numbers of blocks turned into real text, its times into Poisson arrivals.

Which requests: conversations, that is requests with the same first two blocks, of at least two requests each. They are taken whole, in
the order in which they begin, until there are enough, and come in the trace's order. Most prompts of a trace share nothing but their
first block within a few hundred requests; these are those whose later turns go on from earlier ones.

How long: a block of the trace is 512 tokens; here it is 512 / scale. Prompts and answers are divided by the scale and rounded up, and a
prompt that leaves no room for its answer in the model's positions loses its end.

What text: a block is its number in words of the model, then a passage of a real text that begins at a place which the number decides.
The same number is the same tokens, and no two numbers are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.bench.replay_trace import BLOCK_TOKENS, Request, Trace
from kvstore.errors import InvalidArgument

SCALES = (1, 2, 4, 8, 16, 32)  # a block stays a whole number of tokens, and keeps room for its number
STRIDE_TOKENS = 61  # between the passages of neighbouring numbers: prime, so that all places of the text are used


@dataclass(frozen=True)
class Asked:
    """One request of the load: when it comes, its prompt, and how many tokens its answer has."""

    at_s: float
    tokens: list[int]
    answer_tokens: int


@dataclass(frozen=True)
class Load:
    """All requests, by arrival; `cut` of them lost the end of their prompt. `shared_tokens`: what an unlimited cache would find."""

    asked: list[Asked]
    cut: int
    shared_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(len(each.tokens) for each in self.asked)

    @property
    def answer_tokens(self) -> int:
        """Of all answers."""
        return sum(each.answer_tokens for each in self.asked)


@dataclass(frozen=True)
class Shape:
    """How a load is made. `rate`: requests a second on average; `positions`: the most tokens of prompt and answer."""

    requests: int
    rate: float
    scale: int
    positions: int
    seed: int = 1


def make(trace: Trace, shape: Shape, encode: Callable[[str], list[int]], text: str) -> Load:
    """The load. Raises InvalidArgument for a shape or a trace that gives none."""
    if shape.scale not in SCALES:
        raise InvalidArgument(f"--scale is {shape.scale}; give one of {', '.join(map(str, SCALES))}")
    if shape.rate <= 0 or shape.requests < 1:
        raise InvalidArgument("--rate and --requests must be above 0")
    chosen = conversations(trace, shape.requests)
    if not chosen:
        raise InvalidArgument(f"{trace.name}: no two of its requests share more than a first block; name another trace")
    size = BLOCK_TOKENS // shape.scale
    passages = Passages(encode, text, size)
    pauses_s = np.random.default_rng(shape.seed).exponential(1 / shape.rate, len(chosen))
    arrivals_s = np.cumsum(pauses_s) - pauses_s[0]
    asked, cut = [], 0
    for request, at_s in zip(chosen, arrivals_s.tolist(), strict=True):
        answer = max(1, -(-request.output_tokens // shape.scale))
        wanted = max(1, -(-request.input_tokens // shape.scale))
        tokens = [token for number in request.blocks.tolist() for token in passages.block(number)][:wanted]
        room = shape.positions - answer
        cut += len(tokens) > room
        asked.append(Asked(at_s, tokens[:room], answer))
    return Load(asked, cut, shared_tokens(asked, size))


def conversations(trace: Trace, count: int) -> list[Request]:
    """Up to `count` requests of whole conversations, in the trace's order; the last conversation perhaps not whole."""
    of: dict[tuple[int, int], list[int]] = {}
    for index, request in enumerate(trace.requests):
        if len(request.blocks) > 1:
            of.setdefault((int(request.blocks[0]), int(request.blocks[1])), []).append(index)
    chosen = [index for turns in of.values() if len(turns) > 1 for index in turns][:count]
    return [trace.requests[index] for index in sorted(chosen)]


def shared_tokens(asked: Sequence[Asked], size: int) -> int:
    """Tokens in leading blocks of `size` tokens that an earlier prompt had too; a prompt's last token never counts."""
    seen: set[bytes] = set()
    found = 0
    for each in asked:
        packed = np.array(each.tokens, np.int32)
        prefixes = [packed[:end].tobytes() for end in range(size, len(packed) + 1, size)]
        hits = 0
        while hits < len(prefixes) and hits < (len(packed) - 1) // size and prefixes[hits] in seen:
            hits += 1
        found += hits * size
        seen.update(prefixes)
    return found


class Passages:
    """The tokens of each block."""

    def __init__(self, encode: Callable[[str], list[int]], text: str, size: int) -> None:
        self._encode, self._size = encode, size
        self._text = encode(text)
        self._made: dict[int, list[int]] = {}

    def block(self, number: int) -> list[int]:
        """So many tokens for a number."""
        if number not in self._made:
            head = self._encode(f"\n{number}: ")[: self._size]
            places = (number * STRIDE_TOKENS + np.arange(self._size - len(head))) % len(self._text)
            self._made[number] = head + [self._text[place] for place in places.tolist()]
        return self._made[number]
