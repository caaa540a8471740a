"""The metrics' HTTP server: a few callers at a time, none of whom may dawdle, so that none takes the daemon's threads and descriptors."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

MAX_CALLERS = 16  # at once; whoever comes then is cut off, and asks again
CALLER_S = 10.0  # seconds of a caller's silence

log = logging.getLogger(__name__)


class _Handler(WSGIRequestHandler):
    timeout = CALLER_S

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._places = threading.BoundedSemaphore(MAX_CALLERS)
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for this caller, if there is a place."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """All that one caller wants."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller was silent, or went."""
        log.debug("metrics: a caller was given up", exc_info=True)


def serve(registry: CollectorRegistry, host: str, port: int) -> tuple[Callable[[], None], int]:
    """Answer on host:port in threads of its own. Returns how to stop it, and the port. Raises OSError."""
    family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    kind = type("Server", (_Server,), {"address_family": family})
    server: WSGIServer = make_server(str(place[0]), port, make_wsgi_app(registry), kind, _Handler)
    thread = threading.Thread(target=server.serve_forever, name="kvstore-metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop, server.server_port
