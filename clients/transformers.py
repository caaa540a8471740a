"""transformers shares prefixes through the store: two calls around `generate`.

    prefixes = PrefixStore(model, client)                              # once for a model
    cache = prefixes.load(inputs.input_ids, inputs.attention_mask)     # the longest stored prefix, in a DynamicCache
    out = model.generate(**inputs, cache=cache)
    prefixes.store(cache, out)                                         # what was computed, for whoever comes next

For models whose cache is keys and values of every token in every layer, latent ones (MLA) among them; others are refused.
One thread at a time may call a PrefixStore; both calls copy, and wait for the daemon under a deadline. This module needs torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvstore.clients.arena import Bytes
from kvstore.clients.batches import Row, fillable_columns, rows_of
from kvstore.clients.client import GET_TIMEOUT_S, KVClient
from kvstore.clients.handles import Namespace
from kvstore.clients.patience import TROUBLE, Patience
from kvstore.clients.requests import MAX_BLOCKS_PER_CALL
from kvstore.clients.transformers_model import (
    Layout,
    check_fits,
    has_adapters,
    identity_of,
    layout_of,
    padding_ids,
    same_weights,
    weights_now,
)
from kvstore.errors import InvalidArgument
from kvstore.hashing import HASH_BYTES, Identity, block_hashes, fingerprint, usable_blocks

__all__ = ["PrefixCache", "PrefixStore", "Stored", "identity_of"]

BLOCK_TOKENS = 16  # tokens: as the worker's, so that the two can share
CHANGED = "the model's weights have changed since its PrefixStore was made: nothing is loaded or stored; make a new PrefixStore"
BLOCKS_AT_ONCE = 64  # blocks gathered before they are written: some tens of MiB beside the cache itself

log = logging.getLogger("kvstore.transformers")


class PrefixCache(DynamicCache):
    """A DynamicCache that knows whose prompts it holds. Made by `PrefixStore.load`; give it to `generate`, then to `store`.

    hit_tokens   of each row, the tokens whose keys and values came from the store
    fault        why the store was not used, "" if it was
    """

    def __init__(self, config: Any, rows: Sequence[Row], root: bytes) -> None:
        super().__init__(config=config)
        self.rows = list(rows)
        self.root = root
        self.hit_tokens = (0,) * len(rows)
        self.fault = ""
        self.rearranged = False  # by a beam search: which answer a row holds is no longer known

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beams change places: only the prompts can be stored afterwards."""
        self.rearranged = True
        self._pick(beam_idx.tolist())
        super().reorder_cache(cast(Any, beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one beside the other: for several answers to each prompt."""
        self._pick([row for row in range(len(self.rows)) for _ in range(repeats)])
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows only."""
        self._pick(torch.arange(len(self.rows))[indices.cpu()].tolist())
        super().batch_select_indices(indices)

    def _pick(self, chosen: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in chosen]
        self.hit_tokens = tuple(self.hit_tokens[row] for row in chosen)


@dataclass(frozen=True)
class Stored:
    """Of each row, how many leading tokens the store has now; `fault` says why it may have fewer than it could, "" where it has not."""

    tokens: tuple[int, ...]
    fault: str = ""


class PrefixStore:
    """The store, for one model. The client stays the caller's to close.

    identity       under which facts blocks are shared; None makes it of the model in memory (see `identity_of`). One that is given
                   must have the model's dtype and position; its adapter and salt are those of requests that give none
    block_tokens   tokens of a block: what a prefix is shared by
    Raises InvalidArgument or GeometryError for a model whose cache is not keys and values of every token.
    """

    def __init__(
        self, model: PreTrainedModel, client: KVClient, identity: Identity | None = None, *, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        self.model, self._client = model, client
        self._check_mode()
        self._layout: Layout = layout_of(model, block_tokens)
        self._weights = weights_now(model)
        self.geometry = self._layout.geometry
        self.identity = identity_of(model) if identity is None else identity
        check_fits(self.identity, model)
        self._namespace: Namespace | None = None
        self._patience = Patience(log)
        self._said_changed = False

    def load(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        adapter: str | None = None,
        salt: str | None = None,
        timeout_s: float = GET_TIMEOUT_S,
    ) -> PrefixCache:
        """The longest stored prefix of these prompts [batch, columns], padded on the left; an empty cache where there is none.

        adapter   the digest of the active adapter's weights: a model that has adapters needs one at each call
        salt      only requests with an equal one share
        timeout_s for blocks to come up from the disk: what has not come by then is computed
        Of a batch, as many columns as every row can fill. A store in trouble costs seconds, once in a while, and never the answer. Where
        the weights have changed since this PrefixStore was made it is empty, and its `fault` says so.
        """
        self._check_mode()
        if adapter is None and not self.identity.adapter and has_adapters(self.model):
            raise InvalidArgument("the model has adapters: give adapter= a digest of the active one's weights, 'none' for none")
        wanted = {name: value for name, value in (("adapter", adapter), ("salt", salt)) if value is not None}
        rows = rows_of(_numbers(input_ids), None if attention_mask is None else _numbers(attention_mask))
        cache = PrefixCache(self.model.config, rows, fingerprint(replace(self.identity, **wanted)))
        if self._changed():
            cache.fault = CHANGED
            return cache
        try:
            self._fill(cache, time.monotonic() + timeout_s)
        except TROUBLE as error:
            cache.fault = self._patience.excuse(error)
        return cache

    def store(self, cache: PrefixCache, sequences: Tensor | None = None) -> Stored:
        """Leave in the store what `cache` holds and the store has not. The blocks are there for anybody when this returns.

        sequences   [batch, columns] what `generate` returned: the prompts, padding included, and their answers. None: the prompts only
        Of answers found by a beam search nothing is stored, of their prompts all. A store in trouble is no error; see Stored.
        """
        self._check_mode()
        if not isinstance(cache, PrefixCache):
            raise InvalidArgument(f"a {type(cache).__name__} does not say whose tokens it holds; store the cache that load() gave")
        texts = _texts(cache, None if sequences is None else _numbers(sequences), padding_ids(self.model))
        done = [0] * len(texts)
        if cache.get_seq_length() == 0:
            return Stored(tuple(done))
        if self._changed():
            return Stored(tuple(done), CHANGED)
        self._layout.check(cache, len(texts))
        try:
            for row, tokens in enumerate(texts):
                done[row] = self._store_row(cache, row, tokens)
        except TROUBLE as error:
            return Stored(tuple(done), self._patience.excuse(error))
        return Stored(tuple(done))

    # ---- loading

    def _fill(self, cache: PrefixCache, deadline: float) -> None:
        space, size, rows = self._opened(), self.geometry.block_tokens, cache.rows
        chains = []
        for row in rows:
            usable = min(usable_blocks(len(row.tokens), size), MAX_BLOCKS_PER_CALL)
            chains.append(block_hashes(cache.root, row.tokens[: usable * size], size))
        if len(rows) > 1:  # blocks that another row's miss makes useless need not come up from the disk
            columns = fillable_columns(rows, [self._client.lookup(space, chain).blocks * size if chain else 0 for chain in chains])
            chains = [chain[: max(-(-(columns - row.padding) // size), 0) * HASH_BYTES] for chain, row in zip(chains, rows, strict=True)]
        with ExitStack() as held:
            leases = [
                held.enter_context(self._client.get(space, chain, timeout_s=max(deadline - time.monotonic(), 0.0))) for chain in chains
            ]
            columns = fillable_columns(rows, [lease.blocks * size for lease in leases])
            if columns == 0:
                return
            parts = self._gathered(rows, [lease.views for lease in leases], columns)
            for lease in leases:
                lease.check()  # a lease that ended meanwhile was no promise: then nothing was loaded
        for index, keys, values in zip(self._layout.layers, *parts, strict=True):
            layer = cast(Any, cache.layers[index])
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        cache.hit_tokens = tuple(max(columns - row.padding, 0) for row in rows)

    def _gathered(self, rows: Sequence[Row], blocks: Sequence[Sequence[Bytes]], columns: int) -> list[Tensor]:
        """Keys and values [layer, batch, head, column, dim] of all rows on the model's device; zeros where a row has padding."""
        size, parts = self.geometry.block_tokens, self._layout.empty(len(rows), columns)
        for which, row in enumerate(rows):
            for part in parts:
                part[:, which, :, : row.padding] = 0
            for at, block in zip(range(row.padding, columns, size), blocks[which], strict=False):
                count = min(size, columns - at)
                for part, half in zip(parts, self._layout.halves(block), strict=True):
                    part[:, which, :, at : at + count] = half[:, :, :count]
        return [part.to(self.model.device) for part in parts]

    # ---- storing

    def _store_row(self, cache: PrefixCache, row: int, tokens: NDArray[np.int64]) -> int:
        """Store one row's full blocks, some at a time. Returns how many leading tokens the store has."""
        space, size = self._opened(), self.geometry.block_tokens
        hashes, parent, done = block_hashes(cache.root, tokens, size), cache.root, 0
        for first in range(0, len(hashes) // HASH_BYTES, BLOCKS_AT_ONCE):
            piece = hashes[first * HASH_BYTES : (first + BLOCKS_AT_ONCE) * HASH_BYTES]
            with self._client.put(space, piece, parent) as put:
                missing = list(put.blocks)
                if missing:
                    start, stop = missing[0].index, missing[-1].index + 1
                    at = cache.rows[row].padding + first * size
                    parts = self._layout.columns(cache, row, at + start * size, at + stop * size)
                    for block in missing:
                        tokens_of = slice((block.index - start) * size, (block.index - start + 1) * size)
                        for half, part in zip(self._layout.halves(block.view), parts, strict=True):
                            half.copy_(part[:, :, tokens_of])
                        block.done()
            done, parent = first + put.stored, piece[-HASH_BYTES:]
            if put.stored * HASH_BYTES < len(piece):  # no room, or somebody else is writing them
                break
        return done * size

    # ----

    def _opened(self) -> Namespace:
        """The namespace; raises Unavailable at once where the store was in trouble a moment ago."""
        self._patience.check()
        if self._namespace is None:
            self._namespace = self._client.open_namespace(self.identity, self.geometry)
        return self._namespace

    def _check_mode(self) -> None:
        if self.model.training:
            raise InvalidArgument("the model is in training mode, where dropout changes its keys and values; call model.eval()")

    def _changed(self) -> bool:
        """Whether the identity names other weights than the model's; says so in the log, once."""
        changed = not same_weights(self.model, self._weights)
        if changed and not self._said_changed:
            self._said_changed = True
            log.warning("%s", CHANGED)
        return changed


def _numbers(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().cpu().numpy()


def _texts(cache: PrefixCache, sequences: NDArray[Any] | None, padding: Sequence[int]) -> list[NDArray[np.int64]]:
    """The tokens of each row whose keys and values the cache holds. Raises InvalidArgument for sequences of other prompts."""
    if sequences is not None and not cache.rearranged:
        if sequences.ndim != 2 or len(sequences) != len(cache.rows):
            raise InvalidArgument(f"sequences are {sequences.shape}, the cache has {len(cache.rows)} rows; give what generate returned")
        texts = []
        for which, (row, columns) in enumerate(zip(cache.rows, sequences, strict=True)):
            if not np.array_equal(columns[row.padding : row.columns], row.tokens):
                raise InvalidArgument(f"sequence {which} does not begin with the prompt that its row was loaded for; keep both in order")
            texts.append(columns[row.padding : _end(columns, row.columns, padding)].astype(np.int64))
    else:
        texts = [row.tokens for row in cache.rows]
    computed = cache.get_seq_length()
    return [text[: max(computed - row.padding, 0)] for text, row in zip(texts, cache.rows, strict=True)]


def _end(columns: NDArray[Any], prompt: int, padding: Sequence[int]) -> int:
    """Where an answer ends: behind the first of the ids with which `generate` filled its row up. Of those that follow, none is of use."""
    end = len(columns)
    while end - 1 > prompt and int(columns[end - 2]) == int(columns[end - 1]) and int(columns[end - 1]) in padding:
        end -= 1
    return end
