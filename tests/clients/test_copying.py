"""Copies by several threads: when they may be had, and that none of them outlives the call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from kvstore.clients.copying import PIECE_BYTES, Buffer, address, checked, copy_blocks
from kvstore.errors import InvalidArgument

SIZE_BYTES = 4 * PIECE_BYTES
AT_EXIT = f"""
import threading, time
import numpy as np
from kvstore.clients.copying import address, copy_blocks

def late():
    time.sleep(0.3)
    source, target = np.ones({SIZE_BYTES}, np.uint8), np.zeros({SIZE_BYTES}, np.uint8)
    copy_blocks([address(target)], [address(source)], {SIZE_BYTES}, lambda which, start, stop: None)
    print(target.all())

threading.Thread(target=late).start()
"""


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def test_a_thread_of_a_program_whose_main_thread_has_ended_can_copy() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n", done.stderr


alone = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one processor nobody helps")


@alone
def test_an_interrupted_copy_has_ended_when_it_raises() -> None:
    """Otherwise a helper would write into slots that were given back."""
    source, target = np.ones(SIZE_BYTES, np.uint8), np.zeros(SIZE_BYTES, np.uint8)
    helper_is_at = threading.Event()

    def slowly(which: int, start: int, stop: int) -> None:
        if threading.current_thread() is threading.main_thread():
            helper_is_at.wait(10)
        else:
            helper_is_at.set()
            time.sleep(0.3)  # so that the main thread has its own piece behind it, most often
            signal.pthread_kill(here, signal.SIGINT)
            time.sleep(0.7)

    here = threading.get_ident()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background may have been told to ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            copy_blocks([address(target)], [address(source)], SIZE_BYTES, slowly)
    finally:
        signal.signal(signal.SIGINT, before)
    after = target.copy()
    time.sleep(1.2)
    assert (target == after).all()
    assert target.all()


@alone
def test_what_breaks_in_a_helper_is_raised() -> None:
    helper_has_been = threading.Event()

    def breaking(which: int, start: int, stop: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            helper_has_been.set()
            raise OSError("of the helper")
        helper_has_been.wait(10)

    memory = np.zeros(SIZE_BYTES, np.uint8)
    with pytest.raises(OSError, match="of the helper"):
        copy_blocks([address(memory)], [address(memory)], SIZE_BYTES, breaking)


@pytest.mark.parametrize("buffer", [np.zeros(8, np.uint8)[::2], "text", b"abc", b""])
def test_what_is_no_block_is_a_typed_error(buffer: Buffer) -> None:
    with pytest.raises(InvalidArgument, match="a source"):
        checked(buffer, 4, "a source", writable=False)
