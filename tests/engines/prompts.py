"""Prompts of token ids: the engine need not make sense of them, only answer the same way twice."""

BLOCK_TOKENS = 128  # tokens: vLLM's block on a CPU


def prompt(seed: int, tokens: int, vocabulary: int = 40_000) -> list[int]:
    """So many ids; another seed, another prompt from its first token on."""
    return [(seed * 7919 + at * (2 * seed + 31)) % (vocabulary - 10) + 10 for at in range(tokens)]
