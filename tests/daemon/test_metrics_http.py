"""The metrics' HTTP server, and callers who connect and say nothing."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Gauge

from kvstore.daemon import metrics_http
from kvstore.daemon.metrics_http import MAX_CALLERS


@pytest.mark.parametrize("words", [b"", b"GET /metrics HT", b"GET /metrics HTTP/1.1\r\nHost: me\r\n"])
def test_callers_who_dawdle_take_few_threads_and_are_given_up(monkeypatch: pytest.MonkeyPatch, words: bytes) -> None:
    monkeypatch.setattr(metrics_http._Handler, "timeout", 1.0)
    registry = CollectorRegistry()
    Gauge("works", "whether it does", registry=registry).set(1)
    before = threading.active_count()
    stop, port = metrics_http.serve(registry, "127.0.0.1", 0)
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(5 * MAX_CALLERS):
                silent = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                with contextlib.suppress(OSError):  # those beyond the bound are cut off already
                    silent.sendall(words)
            assert threading.active_count() <= before + 1 + MAX_CALLERS
            assert b"works 1.0" in until_answered(port)
    finally:
        stop()


def until_answered(port: int) -> bytes:
    """The metrics, once a place is free."""
    for _ in range(600):
        try:
            answer: bytes = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()
            return answer
        except (OSError, http.client.HTTPException):
            time.sleep(0.05)
    raise AssertionError("no answer")


def test_it_answers_on_ipv6_too() -> None:
    registry = CollectorRegistry()
    try:
        stop, port = metrics_http.serve(registry, "::1", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    try:
        assert urllib.request.urlopen(f"http://[::1]:{port}/metrics", timeout=10).status == 200
    finally:
        stop()
