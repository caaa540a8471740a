"""A limit on bytes per second that lets a burst through and then holds the average. Pure: the time is passed in."""

from __future__ import annotations

BURST_S = 0.5  # seconds: what may be spent at once after a pause, as a share of a second's budget


class ByteBudget:
    """Spending is allowed while the balance is positive and may overdraw it, so one block larger than the burst still passes."""

    def __init__(self, bytes_per_s: int) -> None:
        """0: no limit."""
        self.bytes_per_s = bytes_per_s
        self._balance_bytes = bytes_per_s * BURST_S
        self._counted_at = float("-inf")

    def allows(self, now: float) -> bool:
        """Whether something may be spent now."""
        if not self.bytes_per_s:
            return True
        earned_bytes = (now - self._counted_at) * self.bytes_per_s
        self._balance_bytes = min(self.bytes_per_s * BURST_S, self._balance_bytes + earned_bytes)
        self._counted_at = now
        return self._balance_bytes > 0

    def spend(self, size_bytes: int) -> None:
        """Take this much, even if it is more than there is."""
        if self.bytes_per_s:
            self._balance_bytes -= size_bytes

    def allows_at(self) -> float:
        """When something may be spent next."""
        return self._counted_at + max(0.0, -self._balance_bytes) / self.bytes_per_s if self.bytes_per_s else self._counted_at
