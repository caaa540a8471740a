"""Prompts of token ids: the engine need not make sense of them, only answer the same way twice."""

BLOCK_TOKENS = 128  # tokens: vLLM's block on a CPU


def prompt(seed: int, tokens: int) -> list[int]:
    """So many ids; another seed, another prompt from its first token on."""
    return [(seed * 7919 + at * (seed + 31)) % 40_000 + 10 for at in range(tokens)]
