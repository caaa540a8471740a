"""`kvstore bench replay` as it is typed: table, plot, JSON, picture, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.main import main

SMALL = ["--requests", "60", "--dram", "4GiB,16GiB", "--nvme", "0,64GiB"]


def replay(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["bench", "replay", *words])
    out, err = capsys.readouterr()
    return status, out, err


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_the_table_has_a_row_for_each_cell_of_the_grid(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = replay(capsys, *SMALL, "--json", str(tmp_path / "rows.json"))
    assert status == 0
    rows = rows_of(tmp_path / "rows.json")
    lines = out.split("saved\n")[1].splitlines()[: len(rows)]
    assert [line.split()[0] for line in lines[:2]] == ["unlimited", "4.0"]
    assert len(rows) == 1 + 2 * 2 * 4
    assert [row["eviction"] for row in rows[1:5]] == ["lru", "s3fifo", "cost", "optimum"]
    for row, line in zip(rows, lines, strict=True):
        assert f"{row['hit_rate']:.1%}" in line
        assert f"{row['ttft_saved']:.1%}" in line
        assert row["hit_rate"] == pytest.approx(row["dram_hit_rate"] + row["nvme_hit_rate"])
        assert row["hit_rate"] <= rows[0]["hit_rate"]


def test_the_terminal_shows_a_plot_for_each_disk(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = replay(capsys, *SMALL, "--policies", "lru,optimum")
    for title in ("hit rate over dram, without nvme", "hit rate over dram, with 64.0 GiB of nvme"):
        plot = out.split(title)[1].split("optimum")[0]
        assert plot.count("●") == 3  # two sizes, and the key below
        assert plot.count("▲") == 3


def test_several_processes_find_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for jobs in ("1", "2"):
        replay(capsys, *SMALL, "--json", str(tmp_path / jobs), "--jobs", jobs)
    assert rows_of(tmp_path / "1") == rows_of(tmp_path / "2")


def test_the_machine_is_what_the_flags_say(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    words = ["--config", str(tmp_path), "--nvme-read-gbps", "0", "--nvme-write-gbps", "3", "--prefill-tokens-per-s", "500"]
    replay(capsys, *words, "--requests", "5", "--dram", "64MiB", "--nvme", "0", "--json", str(tmp_path / "rows.json"))
    machine = json.loads((tmp_path / "rows.json").read_text())["machine"]
    assert machine["token_bytes"] == 2 * 2 * 2 * 16 * 2
    assert machine["block_bytes"] == 512 * machine["token_bytes"]
    assert (machine["nvme_read_bytes_per_s"], machine["nvme_write_bytes_per_s"], machine["prefill_tokens_per_s"]) == (0.0, 3e9, 500)


def test_a_picture_is_drawn_where_it_can_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert replay(capsys, *SMALL, "--policies", "lru,optimum", "--png", str(tmp_path / "curve.png"))[0] == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = replay(capsys, *SMALL, "--png", str(tmp_path / "curve.png"))
    assert (status, out) == (2, "")  # before it spends minutes on replays
    assert "kvstore[bench]" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policies", "lru,mru"], "'mru' is none"),
        (["--dram", "1MiB"], "a block takes 67108864 bytes"),
        (["--dram", "much"], "is no size"),
        (["--nvme", "-1"], "is no size"),
        (["--dram-gbps", "0"], "above 0"),
        (["--nvme-read-gbps", "-2"], "above 0"),
        (["--prefill-tokens-per-s", "nan"], "above 0"),
        (["--jobs", "0"], "at least 1"),
        (["--trace", "/nonexistent.jsonl"], "No such file"),
        (["--json", "/nonexistent/rows.json", "--policies", "lru", "--dram", "4GiB", "--nvme", "0"], "can be written"),
        (["--png", "/nonexistent/curve.png", "--policies", "lru", "--dram", "4GiB", "--nvme", "0"], "can be written"),
    ],
)
def test_what_cannot_be_is_refused_in_words(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    if "--png" in words:
        pytest.importorskip("matplotlib")
    status, _, err = replay(capsys, "--requests", "3", *words)
    assert status == 2
    assert says in err


def test_a_trace_without_blocks_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    status, _, err = replay(capsys, "--trace", str(tmp_path / "empty.jsonl"))
    assert status == 2
    assert "no blocks" in err
