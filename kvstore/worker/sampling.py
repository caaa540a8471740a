"""Chooses the next token from a row of logits: greedy or drawn, with OpenAI's settings; one sampler for each branch of a request.

A draw depends on (seed, branch, how many tokens the branch has made) and the row alone. So the answer to a seed is the same whoever
shares the batch, and a branch that was interrupted goes on as it would have.
"""

import hashlib
import math
import secrets
import struct
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from kvstore.errors import InternalFault, InvalidArgument
from kvstore.worker.requests import Choice, Sampling

MAX_TEMPERATURE = 2.0  # a divisor without unit: OpenAI's limit
MAX_PENALTY = 2.0  # logits: OpenAI's limit, either way
MAX_LOGPROBS = 20  # tokens told beside each one: OpenAI's limit
SEED_BITS = 64  # seeds are signed numbers of so many bits
COLDEST = 1e-5  # a divisor without unit: below it the likeliest token is all that float32 can tell from the rest
_HEAD_TOKENS = 1024  # tokens: the mass of top_p is nearly always among so many, and finding them is far quicker than sorting all
_GROWTH = 8  # times as many tokens where it is not: three tries for the largest vocabularies


def check(sampling: Sampling) -> None:
    """Raises InvalidArgument for a value that is outside what it may be; its text names the field and says what is allowed."""
    _within("temperature", sampling.temperature, 0.0, MAX_TEMPERATURE)
    _within("top_p", sampling.top_p, 0.0, 1.0)
    _within("min_p", sampling.min_p, 0.0, 1.0)
    _within("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _within("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    if sampling.top_k < 0:
        raise InvalidArgument(f"top_k is {sampling.top_k}; give how many tokens to keep, or 0 for all")
    if not -1 <= sampling.logprobs <= MAX_LOGPROBS:
        raise InvalidArgument(f"logprobs is {sampling.logprobs}; at most {MAX_LOGPROBS} of the likeliest tokens are told")
    half = 1 << (SEED_BITS - 1)
    if sampling.seed is not None and not -half <= sampling.seed < half:
        raise InvalidArgument(f"seed is {sampling.seed}; give a signed number of {SEED_BITS} bits")


class Sampler:
    """The choices of one branch. Any thread, one at a time. Raises InvalidArgument as `check` does."""

    def __init__(self, sampling: Sampling, branch: int) -> None:
        check(sampling)
        self._sampling = sampling
        self.greedy = sampling.temperature < COLDEST
        self._penalised = bool(sampling.presence_penalty or sampling.frequency_penalty)
        self.plain = self.greedy and not self._penalised and sampling.logprobs < 0  # nothing but the likeliest token is asked for
        seed = secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed % (1 << SEED_BITS)
        self._key = struct.pack("<QQ", seed, branch)

    def choose(self, logits: Tensor, made: Sequence[int]) -> Choice:
        """The next token after `made`, the tokens of this branch so far.

        logits [vocab] of any float dtype, untouched. Log-probabilities are those of the model: before penalties and temperature.
        Raises InternalFault where the logits are no numbers.
        """
        row = logits.float()
        adjusted = self._after_penalties(row, made) if self._penalised and len(made) else row
        token = _likeliest(adjusted) if self.greedy else self._drawn(adjusted, len(made))
        return Choice(token) if self._sampling.logprobs < 0 else _with_logprobs(token, row, self._sampling.logprobs)

    def _after_penalties(self, row: Tensor, made: Sequence[int]) -> Tensor:
        tokens = torch.tensor(made, dtype=torch.long, device=row.device)
        adjusted = row.clone()
        adjusted[tokens] -= self._sampling.presence_penalty  # once for each token: of equal indices one write counts
        return adjusted.index_add_(0, tokens, torch.full_like(tokens, -self._sampling.frequency_penalty, dtype=row.dtype))

    def _drawn(self, row: Tensor, position: int) -> int:
        weights, tokens = _kept(row, self._sampling)
        mass = weights.cumsum(0, dtype=torch.float64)
        total = float(mass[-1])
        if not 0 < total < math.inf:
            raise _no_numbers()
        # Below the total, which a product of a number next to 1 may round to: a token without weight is never drawn.
        aim = min(self._uniform(position) * total, math.nextafter(total, 0.0))
        at = int(torch.searchsorted(mass, aim, right=True))
        return at if tokens is None else int(tokens[at])

    def _uniform(self, position: int) -> float:
        """A number in [0, 1) that only the seed, the branch and the position decide."""
        digest = hashlib.blake2b(struct.pack("<Q", position), key=self._key, digest_size=8).digest()
        return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def choose_all(logits: Tensor, samplers: Sequence[Sampler], made: Sequence[Sequence[int]]) -> list[Choice]:
    """The next token of each branch: logits [batch, vocab], and for each row its sampler and the tokens that its branch has made.

    Rows that ask for nothing but the likeliest token are done in one step. Raises InternalFault where logits are no numbers.
    """
    plain = [at for at, sampler in enumerate(samplers) if sampler.plain]
    rows = logits if len(plain) == len(samplers) else logits[plain]
    values, tokens = rows.float().max(dim=-1) if plain else (torch.zeros(0), torch.zeros(0, dtype=torch.long))
    if bool(values.isnan().any()):
        raise _no_numbers()
    chosen = dict(zip(plain, cast(list[int], tokens.tolist()), strict=True))
    return [
        Choice(chosen[at]) if at in chosen else sampler.choose(logits[at], tokens)
        for at, (sampler, tokens) in enumerate(zip(samplers, made, strict=True))
    ]


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also where it is no number
        raise InvalidArgument(f"{name} is {value}; give a number from {low:g} to {high:g}")


def _likeliest(row: Tensor) -> int:
    value, token = row.max(dim=-1)
    if bool(value.isnan()):
        raise _no_numbers()
    return int(token)


def _no_numbers() -> InternalFault:
    return InternalFault("the model's logits are not numbers; see that its weights are whole, or load it in another dtype")


def _with_logprobs(token: int, row: Tensor, count: int) -> Choice:
    logprobs = row.log_softmax(dim=-1)
    values, tokens = logprobs.topk(min(count, len(row)))
    return Choice(token, float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))


def _kept(row: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Weights that tokens are drawn by, and their ids; None for all ids in order.

    First the `top_k` likeliest are kept, of them the fewest whose share is `top_p`, of those the ones past `min_p`; at least one.
    """
    # The likeliest weighs 1: nothing overflows, however small the temperature.
    weights = ((row - row.max()) / sampling.temperature).exp()
    count = min(sampling.top_k or len(weights), len(weights))
    best: Tensor = weights
    tokens: Tensor | None = None
    if sampling.top_p < 1:
        best, tokens = _nucleus(weights, count, sampling.top_p)
    elif count < len(weights):
        best, tokens = weights.topk(count)
    return torch.where(best < sampling.min_p, 0.0, best), tokens


def _nucleus(weights: Tensor, count: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Of the `count` largest weights the fewest whose share of their sum is `top_p`, and their ids; at least one."""
    if count < len(weights):
        best, tokens = weights.topk(count)
        needed = top_p * float(best.sum(dtype=torch.float64))
    else:
        needed = top_p * float(weights.sum(dtype=torch.float64))
        head = min(count, _HEAD_TOKENS)
        best, tokens = weights.topk(head)
        while head < count and float(best.sum(dtype=torch.float64)) < needed:
            head = min(count, _GROWTH * head)
            best, tokens = weights.topk(head)
    before = best.cumsum(0, dtype=torch.float64) - best
    keep = before < needed
    keep[0] = True
    return best[keep], tokens[keep]
