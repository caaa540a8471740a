"""Attention over paged K and V, as a function that transformers calls in place of its own.

One forward pass handles one `Step`: the new tokens of some sequences, one after another in a single row, and for each sequence how
many of its tokens are in the cache already. Prompts and single tokens may share a step. Each layer writes the new K and V into the
sequence's slots, gathers what the layer reaches into scratch, and calls transformers' own SDPA path on it. The bytes and the shapes
are those that a contiguous cache would have, so the result is equal to the last bit. Sums are in another order where several
sequences attend together (`joint`, or `native` where that is asked for). Layers that SDPA cannot do (softcap, sinks) go through
`scores`; those with latent attention through `latent`.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvstore.errors import InvalidArgument
from kvstore.worker import latent
from kvstore.worker.joint import JointReader, JointWriter, alike, groups_of
from kvstore.worker.native import Kernels, KernelStep
from kvstore.worker.rows import ArenaRows, Scratch
from kvstore.worker.scores import by_sdpa, softmax_by_hand
from kvstore.worker.spans import Span

NAME = "kvstore_paged"


@dataclass(frozen=True)
class Reach:
    """What the layers of one kind attend to: all tokens before, or the last `window`, the querying one included.

    It stands where transformers passes a mask to its layers, which hand it to the attention unread."""

    window: int | None


@dataclass(frozen=True)
class Layer:
    """What a layer asks of its attention."""

    module: torch.nn.Module
    index: int
    window: int | None
    scaling: float
    softcap: float | None
    sinks: Tensor | None
    is_latent: bool


@dataclass
class Step:
    """One forward pass over the new tokens of its spans. Notes the layers that asked for it, and adds up what its parts took.

    native    the kernels, which then attend for all spans of a single new token; None: torch does
    arrive    called with each layer before it reads: blocks that are on their way to it are waited for there
    """

    spans: list[Span]
    scratch: Scratch
    native: Kernels | None = None
    arrive: Callable[[int], None] | None = None
    gather_s: float = 0.0
    write_s: float = 0.0
    layers: set[int] = field(default_factory=set)
    made: KernelStep | None = None  # by `kernels`, or by who captures a graph of it
    _joint: JointWriter | None = field(init=False, default=None)
    _joint_at: Tensor | None = field(init=False, default=None)
    _apart: list[Span] | None = field(init=False, default=None)
    _groups: dict[int | None, list[tuple[JointReader, list[Span]]]] = field(init=False, default_factory=dict)

    def kernels(self, q_heads: int) -> KernelStep | None:
        """The native calls of this step; None where torch does it all. Made once a step."""
        if self.made is None and self.native is not None:
            self.made = self.native.step(q_heads, self.spans, [span for span in self.spans if span.is_row])
        return self.made

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put a layer's new K and V into their slots: keys [head, token, dim], values likewise."""
        if self._apart is None:
            self._plan_writes()
        for span in self._apart or ():
            span.table.write(layer, span.start, keys[:, span.tokens], values[:, span.tokens])
        if self._joint is not None and self._joint_at is not None:
            at = self._joint_at
            self._joint.write(layer, keys.index_select(1, at), values.index_select(1, at))

    def read(self, layer: int, span: Span, window: int | None, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """K and V from the view's `low` on, [head, token, dim]. `keys` and `values` as in `write`, which must have been called."""
        view = span.view(window)
        if view.gatherer is None:  # all there is was just computed: no need to read it back
            return keys[:, span.tokens].contiguous(), values[:, span.tokens].contiguous()
        began_at = time.perf_counter()
        keys, values = view.gatherer.layer(layer, self.scratch)
        first = view.gatherer.first * span.table.layout.tokens
        tokens = slice(view.low - first, span.total - first)
        self.gather_s += time.perf_counter() - began_at
        return keys[:, tokens], values[:, tokens]

    def groups(self, window: int | None) -> list[tuple[JointReader, list[Span]]]:
        """Spans of a single new token that torch attends for together in layers of this window. Made once a step."""
        found = self._groups.get(window)
        if found is None:
            rows = [span for span in self.spans if span.is_row and span.start]
            arena = alike([(span.table, span.start) for span in rows])
            layout = self.scratch.layout
            some = groups_of(layout, rows, window) if arena is not None else []
            found = [(JointReader(layout, cast(ArenaRows, arena), group, window), group) for group in some]
            self._groups[window] = found
        return found

    def _plan_writes(self) -> None:
        """Single new tokens are written together, where there are several and they are in one arena; the others span by span."""
        single = [span for span in self.spans if span.count == 1]
        places = [(span.table, span.start) for span in single]
        arena = alike(places) if len(single) > 1 else None
        self._apart = self.spans
        if arena is not None:
            self._apart = [span for span in self.spans if span.count > 1]
            self._joint = JointWriter(self.scratch.layout, arena, places)
            self._joint_at = torch.tensor([span.at for span in single])


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Reach | Tensor | None,
    scaling: float | None = None,
    paged_step: Step | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of one layer for the step in `paged_step`, which is passed to the model's forward.

    query   [1, q_heads, new tokens, dim]     key, value  [1, kv_heads, new tokens, dim], all after their rotation; where the layer
    is latent, key [1, 1, new tokens, latent] and value [1, 1, new tokens, rope], as `latent.kept_compressed` leaves them
    softcap the scores are softcap * tanh(score / softcap)     s_aux  [q_heads] the score of a token that nobody sees
    Returns [1, new tokens, q_heads, value dim]. Raises InvalidArgument without a step, and for what it does not do."""
    if paged_step is None:
        raise InvalidArgument("paged attention was called without paged_step; pass it to the model's forward")
    if others.get("position_bias") is not None:
        raise InvalidArgument("the model's attention uses position_bias, which the paged cache does not do; serve it without the store")
    window = _window(attention_mask, others.get("sliding_window"))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = Layer(module, cast(int, module.layer_idx), window, scale, softcap, s_aux, latent.is_latent(module))
    paged_step.layers.add(layer.index)
    if paged_step.arrive is not None:
        paged_step.arrive(layer.index)
    kernels = paged_step.kernels(query.shape[1])
    keys, values = latent.kept(key, value) if layer.is_latent else (key[0], value[0])
    began_at = time.perf_counter()
    if kernels is None:
        paged_step.write(layer.index, keys, values)
    else:
        paged_step.scratch.layout.check(keys, values)
        kernels.write(layer.index, key, value)
    paged_step.write_s += time.perf_counter() - began_at
    if kernels is not None and len(kernels.rows) == len(paged_step.spans):
        return _decoded(layer, kernels, query[0])[None], None
    parts = _in_groups(layer, paged_step, query[0]) if kernels is None else _by_kernels(layer, kernels, query[0])
    done = {id(span) for _, _, some in parts for span in some}
    for span in paged_step.spans:
        if id(span) not in done:
            new = query[:, :, span.tokens]
            out = _by_kernel(layer, kernels, span, new[0])
            if out is None:
                out = _attend(layer, span, new, *paged_step.read(layer.index, span, window, keys, values))
            if len(paged_step.spans) == 1:
                return out, None
            parts.append((span.tokens, out[0], [span]))
    whole = parts[0][1].new_empty((1, query.shape[2], *parts[0][1].shape[1:]))
    for where, part, _ in parts:
        whole[0, where] = part
    return whole, None


Parts = list[tuple[slice | Tensor, Tensor, Sequence[Span]]]  # where in the step, [token, q_heads, value dim], whose


def _attend(layer: Layer, span: Span, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of one sequence by torch: [1, new tokens, q_heads, value dim]."""
    if span.own is not None:
        return span.own.attend(query, keys, values, layer.scaling)
    if layer.is_latent:
        return latent.attend(layer.module, query, keys, span.view(layer.window).mask, layer.scaling)
    if layer.softcap is not None or layer.sinks is not None:
        mask = span.whole_mask(layer.window)[0, 0] if span.count > 1 else None
        return softmax_by_hand(query, keys, values, mask, layer.scaling, layer.softcap, layer.sinks)
    return by_sdpa(layer.module, query, keys, values, span.view(layer.window).mask, layer.scaling)


def _by_kernels(layer: Layer, kernels: KernelStep, query: Tensor) -> Parts:
    """Attention of the single new tokens by the kernels: query [q_heads, token, dim] of the whole step."""
    return [(kernels.at, _decoded(layer, kernels, query), cast(Sequence[Span], kernels.rows))] if kernels.rows else []


def _by_kernel(layer: Layer, kernels: KernelStep | None, span: Span, query: Tensor) -> Tensor | None:
    """Attention of one sequence's several new tokens by the kernels, as `_attend` has it; None where those do not."""
    if kernels is None or span.own is not None or layer.is_latent:
        return None
    out = kernels.attend(layer.index, span, query, layer.scaling, layer.window, layer.softcap, layer.sinks)
    return None if out is None else out[None]


def _decoded(layer: Layer, kernels: KernelStep, query: Tensor) -> Tensor:
    """[row, q_heads, value dim] of the rows."""
    rows = kernels.queries(query)
    if layer.is_latent:
        rows = latent.absorb(layer.module, rows)
    out = kernels.decode(layer.index, rows, layer.scaling, layer.window, layer.softcap, layer.sinks)
    if layer.is_latent:
        out = latent.bring_out(layer.module, out.transpose(0, 1))
    return out


def _in_groups(layer: Layer, step: Step, query: Tensor) -> Parts:
    """As `_by_kernels`, by torch, for as many as are alike; none where the layer asks for what SDPA does not do."""
    if layer.is_latent or layer.softcap is not None or layer.sinks is not None:
        return []
    return [
        (reader.at, reader.attend(layer.index, query.index_select(1, reader.at), layer.scaling), group)
        for reader, group in step.groups(layer.window)
    ]


def _window(mask: Reach | Tensor | None, asked: int | None) -> int | None:
    """The layer's window: as transformers' mask would have it, which its attention must not contradict."""
    if isinstance(mask, Reach):
        if asked not in (None, mask.window):
            raise InvalidArgument(f"the model's attention asks for a window of {asked} tokens, its mask for {mask.window}; not served")
        return mask.window
    if mask is not None:
        raise InvalidArgument("the model makes a mask of its own, which the paged cache does not know; serve it without the store")
    return asked


def reach(*_: object, use_vmap: bool = False, local_size: int | None = None, **__: object) -> Reach:
    """What transformers asks for when it prepares a mask for this attention. Each sequence makes its own of it.

    Raises InvalidArgument where the model adds a rule of its own to the causal one.
    """
    if use_vmap:
        raise InvalidArgument("the model's mask is more than causal, which the paged cache does not know; serve it without the store")
    return Reach(local_size)


_lock = threading.Lock()
_paged: dict[int, tuple[int, ExitStack]] = {}  # by the model's id: how many engines are at work with it, and what makes it as it was


@contextmanager
def paged(model: PreTrainedModel) -> Iterator[None]:
    """The model calls this attention inside, and its own again after; several engines may be inside at once. Any thread."""
    with _lock:
        engines, changed = _paged.get(id(model), (0, ExitStack()))
        if not engines:
            changed.callback(model.set_attn_implementation, model.config._attn_implementation)
            model.set_attn_implementation(NAME)
            changed.enter_context(latent.kept_compressed(model))
        _paged[id(model)] = engines + 1, changed
    try:
        yield
    finally:
        with _lock:
            engines, changed = _paged.pop(id(model))
            if engines > 1:
                _paged[id(model)] = engines - 1, changed
            else:
                changed.close()


def register() -> None:
    """Make the attention known to transformers under NAME. Idempotent."""
    AttentionInterface.register(NAME, cast(Any, paged_attention))
    AttentionMaskInterface.register(NAME, reach)
