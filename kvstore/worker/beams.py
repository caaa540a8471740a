"""Beam search over one prompt: which continuations live on, and which texts are the best. Numbers only; `lives.py` forks the sequences.

The rules are those of transformers' `generate(num_beams=…)` with its defaults: a text's score is the sum of its log-probabilities over
its length; a text that ends counts only if it is among the `width` best of its step; the search is over when `width` texts have ended
and the best that lives is not better than the worst of them, or at `max_tokens`.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Text:
    """A finished text; `score` is its mean log-probability a token."""

    tokens: list[int]
    score: float
    ended: bool  # by the model; else by its length


class BeamSearch:
    """`tokens` of the living beams, best first; one empty one before the first step. `texts`: the best finished, best first."""

    def __init__(self, width: int, max_tokens: int, eos: Collection[int]) -> None:
        self.width, self.max_tokens = width, max_tokens
        self.tokens: list[list[int]] = [[]]
        self.texts: list[Text] = []
        self._eos = frozenset(eos)
        self._scores = torch.zeros(1)

    def advance(self, logits: Tensor) -> list[int]:
        """One step: logits [living beam, vocab]. Which beam each of the next living ones continues, best first; none when it is over."""
        total = torch.log_softmax(logits.float(), dim=-1) + self._scores[:, None]
        best, at = total.flatten().topk(min(self.width * (len(self._eos) + 1), total.numel()))
        length = len(self.tokens[0]) + 1
        parents: list[int] = []
        tokens: list[list[int]] = []
        scores: list[float] = []
        for rank, (score, place) in enumerate(zip(best.tolist(), at.tolist(), strict=True)):
            parent, token = divmod(place, logits.shape[-1])
            text = [*self.tokens[parent], token]
            if token in self._eos or length == self.max_tokens:
                if rank < self.width:
                    self.texts.append(Text(text, score / length, token in self._eos))
            elif len(parents) < self.width:
                parents.append(parent)
                tokens.append(text)
                scores.append(score)
        self.texts = sorted(self.texts, key=lambda each: -each.score)[: self.width]
        if not parents or (len(self.texts) == self.width and scores[0] / length <= self.texts[-1].score):
            return []
        self.tokens, self._scores = tokens, torch.tensor(scores)
        return parents
