"""The checksum is over the key and exactly the block's bytes."""

import threading
import time

import xxhash

from kvstore.checksum import block_checksum

DIGEST, HASH = bytes(range(32)), bytes(range(32, 64))
LARGE_BYTES = 256 << 20  # bytes: some ten milliseconds of work


def test_it_is_xxh3_128_over_digest_hash_and_bytes() -> None:
    data = bytes(range(256)) * 20
    low, high = block_checksum(DIGEST, HASH, memoryview(data))
    assert (high << 64 | low).to_bytes(16, "big") == xxhash.xxh3_128_digest(DIGEST + HASH + data)
    assert (low, high) == (0x1E7D1695C18EDD96, 0x5B3411EC05B8E4C8)


def test_every_part_of_it_counts() -> None:
    data = bytes(5000)
    sums = {
        block_checksum(DIGEST, HASH, memoryview(data)),
        block_checksum(HASH, DIGEST, memoryview(data)),
        block_checksum(DIGEST, DIGEST, memoryview(data)),
        block_checksum(DIGEST, HASH, memoryview(data)[:-1]),
        block_checksum(DIGEST, HASH, memoryview(data[:-1] + b"\1")),
    }
    assert len(sums) == 5


def test_other_threads_run_while_a_large_block_is_summed() -> None:
    data = memoryview(bytearray(LARGE_BYTES))
    turns, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            turns[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before, until = turns[0], time.monotonic() + 5.0
        while time.monotonic() < until and turns[0] - before < 1000:
            before = turns[0]
            block_checksum(DIGEST, HASH, data)
        assert turns[0] - before >= 1000
    finally:
        stop.set()
        thread.join()
