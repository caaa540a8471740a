"""Which files are traces, and what is read from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.bench.replay_trace import EXCERPT, read_trace
from kvstore.errors import InvalidArgument


def trace_of(folder: Path, *requests: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def request(at_ms: float, tokens: int, ids: list[int]) -> dict[str, object]:
    return {"timestamp": at_ms, "input_length": tokens, "output_length": 1, "hash_ids": ids}


def test_requests_come_by_time_with_dense_block_numbers(tmp_path: Path) -> None:
    trace = read_trace(trace_of(tmp_path, request(3000, 700, [90, 17]), request(1500, 1024, [90, 5]), request(0, 0, [])))
    assert [each.at_s for each in trace.requests] == [0.0, 1.5, 3.0]
    assert [each.blocks.tolist() for each in trace.requests] == [[], [0, 2], [0, 1]]
    assert (trace.distinct_blocks, trace.touched_blocks, trace.input_tokens) == (3, 4, 1724)
    assert len({row.tobytes() for row in trace.hashes}) == 3


def test_a_limit_takes_the_first_requests() -> None:
    assert len(read_trace(EXCERPT, 7).requests) == 7
    assert len(read_trace(EXCERPT).requests) == 1000


def test_an_azure_trace_is_refused_since_it_names_no_blocks(tmp_path: Path) -> None:
    path = tmp_path / "code.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n")
    with pytest.raises(InvalidArgument, match="names no blocks"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no json\n", ":1: "),
        ('{"timestamp": 0, "input_length": 5}\n', "hash_ids"),
        ("[1, 2]\n", "each line has"),
        ('{"timestamp": 0, "input_length": "5", "hash_ids": [1]}\n', "numbers"),
        ('{"timestamp": null, "input_length": 5, "hash_ids": [1]}\n', "numbers"),
        ('{"timestamp": 0, "input_length": 5, "hash_ids": [1.5]}\n', "numbers"),
        ('{"timestamp": 0, "input_length": 513, "hash_ids": [1]}\n', "one for each 512"),
        ('{"timestamp": 0, "input_length": 513, "hash_ids": [1, 1]}\n', "twice"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=says):
        read_trace(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"missing\.jsonl: No such file"):
        read_trace(tmp_path / "missing.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(InvalidArgument, match="no text"):
        read_trace(tmp_path / "binary")


def test_the_excerpt_says_where_it_is_from() -> None:
    origin = EXCERPT.with_name("replay_excerpt_origin.txt").read_text(encoding="utf-8")
    assert "Apache License, Version 2.0" in origin
    assert EXCERPT.stat().st_size < 1 << 20
