"""What every peer is given to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

ITEM_BYTES = 2  # bytes of an element: float16


@dataclass(frozen=True)
class Work:
    """So many consecutive blocks of one model's KV, in float16, whose prefix is stored, retrieved, and looked up."""

    blocks: int
    layers: int = 32  # Llama-3-8B's shape: 2 MiB a block
    kv_heads: int = 8
    head_dim: int = 128
    block_tokens: int = 16

    @property
    def block_bytes(self) -> int:
        """K and V of a block's tokens in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * ITEM_BYTES * self.block_tokens

    @property
    def size_bytes(self) -> int:
        """Of all blocks."""
        return self.blocks * self.block_bytes

    @property
    def tokens(self) -> int:
        """Of all blocks."""
        return self.blocks * self.block_tokens

    def as_json(self, directory: Path) -> str:
        """For a driver, which may keep files in `directory`."""
        return json.dumps({**asdict(self), "block_bytes": self.block_bytes, "directory": str(directory)})


def prefix(tokens: int) -> Work:
    """A prefix to look up. Its blocks are small, 4 KiB, since a lookup moves none of their bytes."""
    return Work(tokens // Work.block_tokens, layers=1, kv_heads=1, head_dim=64)
