"""The token ids of blocks in namespaces with tails, beside the index: what makes the first tokens of a stored block findable.

Ids lie in chunks of 16, a block's chunks in a list of their own; chunk 0 means "none". There is one chunk for each row of the index, taken
from the same kind of memory: it costs nothing until it is used. Where chunks run out, further blocks are kept without their ids.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.vocabulary import Tokens

CHUNK_TOKENS = 16  # tokens: the usual block, in one cache line
CHUNK_BYTES = 4 * CHUNK_TOKENS + 4 + 4  # its ids, the next chunk, its place among those given back
ROW_BYTES = 4  # bytes a row: its first chunk

Rows = NDArray[np.int32]


class TokenTable:
    """Token ids by row. Nothing here grows after construction."""

    def __init__(self, rows: int) -> None:
        """`rows`: of the index, with row 0."""
        self.chunks = rows - 1
        self.ids = np.zeros((rows, CHUNK_TOKENS), np.uint32)
        self.after = np.zeros(rows, np.int32)
        self.first = np.zeros(rows, np.int32)  # by row
        self.first_at, self.after_at = self.first.data, self.after.data
        self.blocks = 0
        self._freed = np.zeros(rows, np.int32)
        self._freed_count = 0
        self._fresh = 1  # chunks from here on were never used

    @property
    def used_chunks(self) -> int:
        return self._fresh - 1 - self._freed_count

    @property
    def used_bytes(self) -> int:
        """Of the blocks whose ids are kept."""
        return self.used_chunks * CHUNK_BYTES + self.blocks * ROW_BYTES

    @property
    def capacity_bytes(self) -> int:
        """Address space; memory only as far as it was ever used."""
        return (self.chunks + 1) * (CHUNK_BYTES + ROW_BYTES)

    def room(self, block_tokens: int) -> int:
        """So many more blocks of this size fit."""
        return (self.chunks - self.used_chunks) // -(-block_tokens // CHUNK_TOKENS)

    def put(self, rows: Rows, tokens: Tokens) -> None:
        """Keep the ids [n, block_tokens] of rows that are distinct and have none; the caller has seen to `room`."""
        count, size = tokens.shape
        if not count:
            return
        each = -(-size // CHUNK_TOKENS)
        chunks = self._take(count * each).reshape(count, each)
        padded = np.zeros((count, each * CHUNK_TOKENS), np.uint32)
        padded[:, :size] = tokens
        self.ids[chunks.ravel()] = padded.reshape(-1, CHUNK_TOKENS)
        self.after[chunks[:, :-1]] = chunks[:, 1:]
        self.after[chunks[:, -1]] = 0
        self.first[rows] = chunks[:, 0]
        self.blocks += count

    def put_one(self, row: int, tokens: Tokens) -> None:
        """`put` for one row."""
        before = 0
        for start in range(0, len(tokens), CHUNK_TOKENS):
            if self._freed_count:
                self._freed_count -= 1
                chunk = int(self._freed[self._freed_count])
            else:
                chunk, self._fresh = self._fresh, self._fresh + 1
            piece = tokens[start : start + CHUNK_TOKENS]
            self.ids[chunk, : len(piece)] = piece
            self.after_at[chunk] = 0
            (self.after_at if before else self.first_at)[before or row] = chunk
            before = chunk
        self.blocks += 1

    def _take(self, count: int) -> Rows:
        again = min(count, self._freed_count)
        self._freed_count -= again
        reused = self._freed[self._freed_count : self._freed_count + again].copy()
        fresh = np.arange(self._fresh, self._fresh + count - again, dtype=np.int32)
        self._fresh += count - again
        return np.concatenate([reused, fresh])

    def forget(self, row: int) -> None:
        """The block in this row has left every tier. One without ids is passed over."""
        chunk = self.first_at[row]
        self.blocks -= chunk > 0
        self.first_at[row] = 0
        while chunk:
            self._freed[self._freed_count] = chunk
            self._freed_count += 1
            chunk = self.after_at[chunk]

    def forget_many(self, rows: Rows) -> None:
        """`forget` for many distinct rows."""
        chunks = self.first[rows]
        chunks = chunks[chunks > 0]
        self.blocks -= len(chunks)
        self.first[rows] = 0
        while chunks.size:
            self._freed[self._freed_count : self._freed_count + len(chunks)] = chunks
            self._freed_count += len(chunks)
            chunks = self.after[chunks]
            chunks = chunks[chunks > 0]

    def common(self, rows: Rows, asked: Tokens) -> NDArray[np.int64]:
        """How many of the ids `asked` each of these rows, which have ids, begins with. [n]"""
        same = np.zeros(len(rows), np.int64)
        going, chunks = np.arange(len(rows)), self.first[rows]
        for start in range(0, len(asked), CHUNK_TOKENS):
            piece = asked[start : start + CHUNK_TOKENS]
            equal = self.ids[chunks, : len(piece)] == piece
            whole = equal.all(axis=1)
            same[going] += np.where(whole, len(piece), equal.argmin(axis=1))
            going, chunks = going[whole], self.after[chunks[whole]]
            if not going.size:
                break
        return same

    def tokens_of(self, row: int, block_tokens: int) -> Tokens:
        """The ids of one row that has them. [block_tokens]"""
        chunk, found = self.first_at[row], []
        while chunk:
            found.append(self.ids[chunk])
            chunk = self.after_at[chunk]
        return np.concatenate(found)[:block_tokens]

    def conserved(self, rows: Rows) -> bool:
        """Whether every chunk ever used is in the list of one of these rows, or was given back, and is so once. For the invariants."""
        found: list[int] = self._freed[: self._freed_count].tolist()
        chunks = self.first[rows]
        while (chunks := chunks[chunks > 0]).size:
            found += chunks.tolist()
            chunks = self.after[chunks]
        return sorted(found) == list(range(1, self._fresh))
