"""A prefill worker's engine: a request is over only when all its blocks are in the store, where another worker looks for them next."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from kvstore.clients.blocks import BlockStore
from kvstore.worker.requests import Ended, Event, Listener, Request, Serving, Ticket

FLUSH_S = 10.0  # seconds for the store to acknowledge: past that the blocks may come later, or never, and are computed again

log = logging.getLogger(__name__)


class Flushing:
    """See `requests.Serving`. Passes all on to `inner`; ends come after the store's word, from a thread of this one."""

    def __init__(self, inner: Serving, store: BlockStore) -> None:
        self._inner, self._store = inner, store
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="kvstore-flush")

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Take a request; see `requests.Serving`."""

        def listen(event: Event) -> None:
            if not isinstance(event, Ended):
                listener(event)
                return
            try:
                self._threads.submit(self._end, event, listener)
            except RuntimeError:  # closed: nobody will look for these blocks here
                listener(event)

        return self._inner.submit(request, listen)

    def figures(self) -> dict[str, float]:
        """The engine's; see `requests.Serving`."""
        return self._inner.figures()

    def health(self) -> str:
        """The engine's; see `requests.Serving`."""
        return self._inner.health()

    def close(self) -> None:
        """Wait for the ends that are under way. Idempotent."""
        self._threads.shutdown(wait=True)

    def _end(self, event: Ended, listener: Listener) -> None:
        if not self._store.flush(FLUSH_S):
            log.warning("the store did not acknowledge a prompt's blocks within %.0f s", FLUSH_S)
        listener(event)
