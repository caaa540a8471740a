"""Traces of requests whose prompts name their blocks, in the JSON-lines format that Mooncake published with its FAST'25 paper.

One request a line: `timestamp` (ms since the trace began), `input_length` and `output_length` (tokens), and `hash_ids`: a number for each
512 tokens of the prompt, the last perhaps not full. The same number is the same block after the same blocks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidArgument

BLOCK_TOKENS = 512  # tokens: fixed by the format
NEVER = 1 << 40  # no request: above the number of any
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
EXCERPT = Path(__file__).with_name("replay_excerpt.jsonl")  # what is replayed where no trace is named


@dataclass(frozen=True)
class Request:
    """One prompt. `blocks` are numbers from 0 up, dense over the trace; `output_tokens` those of the answer, 0 where the trace has none."""

    at_s: float
    input_tokens: int
    blocks: NDArray[np.int64]
    output_tokens: int = 0


@dataclass(frozen=True)
class Trace:
    """All requests by arrival. `names` are the files they came from."""

    name: str
    requests: tuple[Request, ...]
    distinct_blocks: int

    @cached_property
    def touched_blocks(self) -> int:
        """Blocks of all prompts, each as often as it stands in one."""
        return sum(len(request.blocks) for request in self.requests)

    @cached_property
    def input_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.input_tokens for request in self.requests)

    @cached_property
    def hashes(self) -> NDArray[np.uint64]:
        """A block hash for each block number, spread as real ones are. [distinct_blocks, 4]"""
        packed = b"".join(hashlib.sha256(b"block %d" % number).digest() for number in range(self.distinct_blocks))
        return np.frombuffer(packed, "<u8").reshape(-1, 4)

    @cached_property
    def next_uses(self) -> tuple[NDArray[np.int64], ...]:
        """For each block of each request the number of the next request that has it, or NEVER."""
        coming = np.full(self.distinct_blocks, NEVER, np.int64)
        found = []
        for number in range(len(self.requests) - 1, -1, -1):
            blocks = self.requests[number].blocks
            found.append(coming[blocks])
            coming[blocks] = number
        return tuple(reversed(found))


def read_trace(path: Path, limit: int = 0) -> Trace:
    """The first `limit` requests of a file, 0 for all of it.

    Raises InvalidArgument for a file that cannot be read, for one in another format, and for a trace that names no blocks.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            wanted = itertools.islice(lines, limit or None)
            return Trace(path.name, *_numbered(_checked(path, wanted)))
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}; name a trace in Mooncake's JSON-lines format") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: no text ({error.reason}); name a trace in Mooncake's JSON-lines format") from error


def _checked(path: Path, lines: Iterable[str]) -> Iterator[tuple[float, int, list[int], int]]:
    for number, line in enumerate(lines, 1):
        if number == 1 and line.lstrip("\ufeff").startswith(AZURE_HEADER):
            raise InvalidArgument(
                f"{path}: an Azure trace: it has times and lengths and names no blocks, so nothing in it says what may be reused; "
                "name a trace with hash_ids, in Mooncake's JSON-lines format"
            )
        if line.strip():
            yield _request(f"{path}:{number}", line)


def _request(where: str, line: str) -> tuple[float, int, list[int], int]:
    try:
        fields: Mapping[str, Any] = json.loads(line)
        at_ms, tokens, ids = fields["timestamp"], fields["input_length"], fields["hash_ids"]
        answer = fields.get("output_length", 0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{where}: {error!r}; each line has timestamp, input_length and hash_ids, as JSON") from error
    numbers = isinstance(at_ms, (int, float)) and type(tokens) is int and isinstance(ids, list)
    if not numbers or any(type(each) is not int for each in ids):
        raise InvalidArgument(f"{where}: timestamp and input_length are numbers and hash_ids is a list of numbers")
    if len(ids) != -(-tokens // BLOCK_TOKENS) or len(set(ids)) != len(ids):
        raise InvalidArgument(f"{where}: {len(ids)} hash_ids for {tokens} tokens; give one for each {BLOCK_TOKENS}, none of them twice")
    return at_ms / 1000, tokens, ids, answer if type(answer) is int else 0


def _numbered(lines: Iterable[tuple[float, int, list[int], int]]) -> tuple[tuple[Request, ...], int]:
    """Requests in the order of their arrival, with dense block numbers."""
    numbers: dict[int, int] = {}
    requests = [
        Request(at_s, tokens, np.array([numbers.setdefault(each, len(numbers)) for each in ids], np.int64), answer)
        for at_s, tokens, ids, answer in lines
    ]
    return tuple(sorted(requests, key=lambda request: request.at_s)), len(numbers)
