"""The machine that a replay imagines: how large a block is, how fast a prompt is computed, how fast bytes move. Pure arithmetic.

The model of a prompt's time to its first token, without queues for the GPU:

    computing tokens a to b:  ((b - a) + (b² - a²) / (2 · quadratic_tokens)) / prefill_tokens_per_s
    first token, cold:        computing 0 to n
    first token, warm:        waiting for nvme  +  bytes of all blocks found / dram_bytes_per_s  +  computing the rest to n

The square is attention: at a context of `quadratic_tokens` it costs as much per token as everything else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvstore.bench.replay_trace import BLOCK_TOKENS


@dataclass(frozen=True)
class Machine:
    """Sizes and speeds. An infinite speed takes no time."""

    token_bytes: int = 131_072  # Llama-3-8B in bfloat16: 32 layers of 8 KV heads of 128, keys and values
    prefill_tokens_per_s: float = 10_000.0  # an 8B model on one large GPU, at a short context
    quadratic_tokens: float = 30_000.0  # Llama-3-8B: 2 · 8e9 operations a token, attention 4 · 32 · 4096 more per token of context
    dram_bytes_per_s: float = 25e9  # host memory to the GPU over 16 lanes of PCIe 4
    nvme_read_bytes_per_s: float = 6e9  # one PCIe 4 disk
    nvme_write_bytes_per_s: float = 2e9  # one PCIe 4 disk, written for hours
    acquire_timeout_s: float = 10.0  # the daemon's default: what has not come up by then is computed

    @property
    def block_bytes(self) -> int:
        """One block of the trace."""
        return self.token_bytes * BLOCK_TOKENS

    def compute_s(self, first: int, end: int) -> float:
        """To compute tokens [first, end) of a prompt whose earlier tokens have their KV."""
        return ((end - first) + (end * end - first * first) / (2 * self.quadratic_tokens)) / self.prefill_tokens_per_s

    def cold_s(self, tokens: int) -> float:
        """To the first token without a store."""
        return self.compute_s(0, tokens)

    def warm_s(self, tokens: int, blocks: int, waited_s: float) -> float:
        """To the first token with the leading `blocks` from the store. The last token is always computed, and with it its block."""
        usable = min(blocks, max(0, tokens - 1) // BLOCK_TOKENS)
        copied_s = 0.0 if math.isinf(self.dram_bytes_per_s) else usable * self.block_bytes / self.dram_bytes_per_s
        return waited_s + copied_s + self.compute_s(usable * BLOCK_TOKENS, tokens)
