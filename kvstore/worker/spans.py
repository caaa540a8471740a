"""One sequence's part in a step: which of its tokens are new, and what those attend to."""

from dataclasses import dataclass, field
from typing import Protocol, cast

from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from kvstore.worker.rows import BlockTable, Gatherer


@dataclass(frozen=True)
class View:
    """What one sequence's new tokens attend to under one reach: tokens `low` and on, through `mask` (None: see `sdpa_mask`)."""

    low: int
    mask: Tensor | None
    gatherer: Gatherer | None


class OwnAttention(Protocol):
    """How a sequence attends that does not do it as the model says."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """One layer's attention: query [1, q_heads, new token, dim], all K and V of its table. Returns [1, new token, q_heads, dim]."""


@dataclass
class Span:
    """One sequence's part in a step: `start` tokens are in its slots; `count` are new, have slots to go to, and are the step's `at` on."""

    table: BlockTable
    start: int
    count: int
    at: int = 0
    own: OwnAttention | None = None
    _views: dict[int | None, View] = field(init=False, default_factory=dict)
    _masks: dict[int | None, Tensor] = field(init=False, default_factory=dict)

    @property
    def tokens(self) -> slice:
        """Where its new tokens are in the step."""
        return slice(self.at, self.at + self.count)

    @property
    def is_row(self) -> bool:
        """Whether the kernels can attend for it."""
        return self.count == 1 and self.own is None

    @property
    def total(self) -> int:
        """Tokens in its slots once the step is done."""
        return self.start + self.count

    def view(self, window: int | None) -> View:
        """What its new tokens attend to in layers of this window. Made once a step."""
        found = self._views.get(window)
        if found is None:
            low = 0 if window is None or not self.start else max(0, self.start - window + 1)
            size = self.table.layout.tokens
            gatherer = Gatherer(self.table, low // size, -(-self.total // size)) if self.start else None
            found = self._views[window] = View(low, self._mask(low, window), gatherer)
        return found

    def whole_mask(self, window: int | None) -> Tensor:
        """[1, 1, new token, token from the view's `low` on]: True where it attends. Made once a step."""
        found = self._masks.get(window)
        if found is None:
            found = self._masks[window] = cast(Tensor, self._mask(self.view(window).low, window, skip=False))
        return found

    def _mask(self, low: int, window: int | None, skip: bool = True) -> Tensor | None:
        rule = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
        return sdpa_mask(
            batch_size=1, q_length=self.count, kv_length=self.total - low, q_offset=self.start, kv_offset=low, mask_function=rule,
            local_size=window, allow_is_causal_skip=skip, device=self.table.layout.device,
        )  # fmt: skip
