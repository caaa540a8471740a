"""What computing a token and loading a block take here, as measured so far: how long a load is worth waiting for."""

SHARE = 0.2  # part: of a new measurement in the running average
FEW_TOKENS = 16  # a step with fewer is mostly its own overhead, and says little of the rate
FLOOR_S = 0.05  # seconds that a load may take however little computing it saves: the usual time of a busy disk
UNKNOWN_S = 10.0  # seconds that a load may take before anything was measured


class Costs:
    """Rates, 0 while unknown. `block_tokens`: tokens of a block."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.compute_tokens_per_s = 0.0
        self.load_blocks_per_s = 0.0

    def computed(self, tokens: int, took_s: float) -> None:
        """A step computed so many tokens."""
        if tokens >= FEW_TOKENS and took_s > 0:
            self.compute_tokens_per_s = _mixed(self.compute_tokens_per_s, tokens / took_s)

    def loaded(self, blocks: int, took_s: float) -> None:
        """A pull brought so many blocks, some of them perhaps in memory already."""
        if blocks and took_s > 0:
            self.load_blocks_per_s = _mixed(self.load_blocks_per_s, blocks / took_s)

    def load_limit_s(self, tokens: int) -> float:
        """How long the KV of so many tokens may take to come before computing it would have been sooner."""
        if not self.compute_tokens_per_s:
            return UNKNOWN_S
        return max(FLOOR_S, min(tokens / self.compute_tokens_per_s, UNKNOWN_S))


def _mixed(before: float, now: float) -> float:
    return now if not before else before + SHARE * (now - before)
