"""`kvstore bench peers`: the pipe to a driver, what becomes of peers that are missing, wrong or dead, and this store's own side."""

from __future__ import annotations

import ast
import json
import os
import sys
import textwrap
from pathlib import Path

import pytest

from kvstore.bench.peers import report
from kvstore.bench.peers.command import peers
from kvstore.bench.peers.measure import HERE, LOOKUPS, Kind, Result, driver, measure, ours
from kvstore.bench.peers.ours import Ours
from kvstore.bench.peers.pipe import Driver, PeerFailed
from kvstore.bench.peers.work import Work, prefix
from kvstore.cli.main import main

TINY = Work(blocks=16, layers=2, kv_heads=1, head_dim=64)
# A peer as a driver's module: a dictionary in its own process. What a test puts into MISCHIEF is done at each store.
FAKE = """
import os, subprocess, sys, time

class Fake:
    def __init__(self, work, servers):
        self.work, self.kept, self.sleeper = work, {}, None
        self.buffer = bytearray(os.urandom(work["blocks"] * work["block_bytes"]))
        servers.start([sys.executable, "-c", "import time; time.sleep(600)"], lambda: True)
        self.server = servers._started[-1].pid
        servers.leftovers.append(servers.directory / "left")
        servers.leftovers[0].touch()
    def about(self):
        print("on the peer's own stdout")
        return {"version": "fake 1", "how": str(self.server)}
    def store(self, turn, per_object):
        MISCHIEF
        self.kept[turn, per_object] = bytes(self.buffer)
        return 0.5 / per_object
    def retrieve(self, turn, per_object, *, into_buffer):
        if into_buffer:
            self.buffer[:] = self.kept[turn, per_object]
        return 0.25
    def lookup(self, turn, per_object):
        return 0.002, self.work["blocks"] if (turn, per_object) in self.kept else 0
    def digest(self):
        return self.buffer.hex()
    def wipe(self):
        self.buffer[:] = bytes(len(self.buffer))
    def clear(self):
        self.kept.clear()
    def close(self):
        pass

def open_peer(work, servers):
    return Fake(work, servers)
"""


def fake(folder: Path, name: str, mischief: str = "pass", per_objects: tuple[int, ...] = (1,), text: str = FAKE) -> Kind:
    path = folder / f"{name}.py"
    path.write_text(text.replace("MISCHIEF", mischief))

    def start(work: Work, directory: Path) -> Driver:
        command = [sys.executable, str(HERE / "driver.py"), str(path), work.as_json(directory)]
        return Driver(command, directory / "log", timeout_s=20.0)

    return Kind(name, start, per_objects)


def run_all(folder: Path, *kinds: Kind, rounds: int = 2) -> dict[str, Result]:
    results, _ = measure(kinds, TINY, TINY, rounds, folder / "run")
    return {result.name: result for result in results}


@pytest.fixture
def small_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.bench.peers.measure.YARDSTICK_BYTES", 4 << 20)


@pytest.mark.usefixtures("small_yardstick")
def test_a_peers_samples_come_through_the_pipe(tmp_path: Path) -> None:
    result = run_all(tmp_path, fake(tmp_path, "good", per_objects=(1, 4)))["good"]
    assert (result.reason, result.bytes_checked) == ("", True)
    assert result.about["version"] == "fake 1"
    assert result.by_object["1"]["store_gbps"] == [pytest.approx(TINY.size_bytes / 0.5 / 1e9)] * 2  # the first round is not counted
    assert result.samples["store_gbps"] == [pytest.approx(TINY.size_bytes / 0.125 / 1e9)] * 2  # the larger objects did better
    assert set(result.samples["lookup_hit_ms"] + result.samples["lookup_miss_ms"]) == {2.0}


@pytest.mark.usefixtures("small_yardstick")
def test_peers_that_fail_are_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    found = run_all(
        tmp_path,
        Kind("missing", driver(tmp_path / "bin" / "python", "drive_redis")),
        fake(tmp_path, "broken", text="import no_such_package"),
        fake(tmp_path, "dying", "turn == 1 and (print('out of cheese', flush=True), os._exit(7))"),
        fake(tmp_path, "raising", "raise RuntimeError('no room')"),
        fake(tmp_path, "wrong", "self.kept[turn, per_object] = b'x' * len(self.buffer); return 1.0"),
        fake(tmp_path, "forgetful", "if turn == 2: return 1.0"),
        fake(tmp_path, "good"),
        rounds=2,
    )
    assert "make bench-peers" in found["missing"].reason
    assert found["broken"].reason == "ModuleNotFoundError: No module named 'no_such_package'"
    assert "status 7" in found["dying"].reason
    assert "out of cheese" in found["dying"].reason
    assert found["raising"].reason == "RuntimeError: no room"
    assert found["wrong"].reason == "what was retrieved is not what was stored"
    assert found["forgetful"].reason == "a lookup of 16 stored blocks found 0"
    assert len(found["forgetful"].samples["lookup_hit_ms"]) == LOOKUPS
    assert found["good"].reason == ""
    assert len(found["good"].samples["retrieve_gbps"]) == 2


def test_a_driver_that_hangs_or_babbles_is_ended_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="no answer within"):
        Driver([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", timeout_s=0.5)
    with pytest.raises(PeerFailed, match="no JSON"):
        Driver([sys.executable, "-c", "print('hello')"], tmp_path / "log")
    with pytest.raises(PeerFailed, match="status 3"):
        Driver([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log")
    with pytest.raises(PeerFailed, match="No such file"):
        Driver([str(tmp_path / "nothing")], tmp_path / "log")


def test_a_driver_ends_with_the_servers_that_it_started(tmp_path: Path) -> None:
    with fake(tmp_path, "good").start(TINY, tmp_path) as side:  # type: ignore[attr-defined]  # a Driver
        server = int(side.about["how"])
        os.kill(server, 0)
        assert (tmp_path / "left").exists()
    assert not (tmp_path / "left").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


def test_drivers_import_nothing_of_kvstore() -> None:
    scripts = sorted(HERE.glob("drive*.py"))
    assert [path.stem for path in scripts] == ["drive_lmcache", "drive_mooncake", "drive_redis", "driver"]
    for path in scripts:
        tree = ast.parse(path.read_text())
        names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        assert not [name for name in names if name.startswith("kvstore") or not name], path


def test_this_store_does_the_same_work(tmp_path: Path) -> None:
    side = Ours(TINY, tmp_path)
    try:
        assert side.ask("store", turn=3)["seconds"] > 0
        assert side.ask("retrieve", turn=3)["seconds"] > 0
        assert side.ask("check", turn=3)["equal"]
        looked_up = side.ask("lookup", turn=3)
        assert looked_up["found"] == TINY.blocks
        assert looked_up["of_hashes_seconds"] < looked_up["seconds"]
        assert side.ask("lookup", turn=4)["found"] == 0
        with pytest.raises(PeerFailed, match="0 of them now"):
            side.ask("store", turn=3)
        side.ask("clear")
        with pytest.raises(PeerFailed, match="0 of 16 blocks came back"):
            side.ask("retrieve", turn=3)
    finally:
        side.close()


@pytest.mark.usefixtures("small_yardstick")
def test_the_command_reports_ours_and_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--bytes", "32MiB", "--tokens", "512", "--rounds", "1", "--venvs", str(tmp_path), "--json", str(tmp_path / "peers.json")]
    assert main(["bench", "peers", *words]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "peers.json").read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["kvstore", *(kind.name for kind in peers(tmp_path))]
    assert rows["kvstore"]["bytes_checked"]
    assert len(rows["kvstore"]["samples"]["1"]["store_gbps"]) == 1
    assert f"{rows['kvstore']['store_gbps']['median']:.2f}" in out
    assert out.count("did not run through: ") == 3
    assert found["ratios"] == []


def test_ratios_say_how_many_times_as_fast_and_which_target_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    def result(name: str, gbps: float, ms: float) -> Result:
        samples = {"store_gbps": [gbps, gbps * 2, gbps / 2], "lookup_hit_ms": [ms]}
        return Result(name, {"version": name, "how": textwrap.shorten(name, 20)}, samples=samples, by_object={"1": samples})

    found = report.figures([result("kvstore", 8.0, 1.0), result("lmcache", 1.6, 2.0), Result("redis", reason="it rained")], [7.0])
    ratios = {each["metric"]: (each["ratio"], each["met"]) for each in found["ratios"]}
    assert ratios == {"store_gbps": (5.0, True), "lookup_hit_ms": (2.0, False)}
    report.show(found)
    out = capsys.readouterr().out
    assert "5.00 (>= 4)" in out
    assert "2.00 (>= 5, missed)" in out
    assert "did not run through: it rained" in out


def test_the_shapes_are_a_llamas_and_a_small_one() -> None:
    assert Work(512).size_bytes == 1 << 30
    assert (prefix(32_768).blocks, prefix(32_768).block_bytes) == (2048, 4096)
    assert ours().per_objects == (1,)
