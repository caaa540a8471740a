"""Why a prompt misses, and what there is: asked by clients of each kind, and by a person at a terminal, of a real daemon."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.cli.main import main
from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.clients.requests import Keep
from kvstore.errors import InvalidArgument, LimitExceeded
from kvstore.geometry import Geometry
from kvstore.hashing import HASH_BYTES, Identity, block_hashes, fingerprint
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, pattern, tokens_of
from tests.clients import kinds

BLOCK_TOKENS = GEOMETRY.block_tokens
SEEDS = itertools.count(1)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture
def daemon(process: DaemonProcess) -> DaemonProcess:
    """The module's, with nothing stored."""
    with KVClient(process.address) as client:
        client.clear()
    return process


@pytest.fixture
def prompt() -> list[int]:
    """Six blocks that may be used; nobody has stored any of them before."""
    return tokens_of(next(SEEDS), 6, extra=3)


@pytest.fixture(params=("threads", "loop"))
def client(request: pytest.FixtureRequest, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[kinds.Client]:
    made = kinds.make(request.param, daemon.address, monkeypatch)
    yield made
    made.close()


def store(client: kinds.Client | KVClient, namespace: Namespace, prompt: list[int], first: int = 0, end: int = 6) -> None:
    """Blocks `first` to `end` of the prompt."""
    root, block_tokens = namespace.root, namespace.geometry.block_tokens
    hashes = block_hashes(root, prompt, block_tokens)
    parent = hashes[HASH_BYTES * (first - 1) : HASH_BYTES * first] if first else root
    with client.put(namespace, hashes[HASH_BYTES * first : HASH_BYTES * end], parent) as put:
        for block in put.blocks:
            block.write(pattern(block.hash, namespace.geometry.block_bytes))


def opened(client: kinds.Client, identity: Identity = IDENTITY, geometry: Geometry = GEOMETRY, shard: str = "") -> Namespace:
    return client.open_namespace(identity, geometry, shard)


def test_a_prompt_that_is_all_here_needs_no_reason(client: kinds.Client, prompt: list[int]) -> None:
    namespace = opened(client)
    store(client, namespace, prompt)
    told = client.explain(namespace, tokens=prompt)
    assert (told.asked_blocks, told.blocks, told.reason, list(told.elsewhere)) == (6, 6, "", [])


@pytest.mark.parametrize("fact", ["model", "revision", "tokenizer", "position", "dtype"])
def test_the_fact_in_which_another_model_s_namespace_differs_is_named(client: kinds.Client, fact: str, prompt: list[int]) -> None:
    here, there = opened(client), opened(client, replace(IDENTITY, **{fact: "another"}))
    store(client, there, prompt)
    told = client.explain(here, tokens=prompt)
    assert (told.blocks, told.reason) == (0, "not_stored")
    assert [(each.digest, each.blocks, each.tokens, dict(each.differs)) for each in told.elsewhere] == [
        (there.digest, 6, 6 * BLOCK_TOKENS, {fact: "another"})
    ]


@pytest.mark.parametrize("fact", ["adapter", "salt"])
def test_the_adapter_or_salt_without_which_it_would_be_found_is_named(client: kinds.Client, fact: str, prompt: list[int]) -> None:
    namespace = opened(client)
    store(client, namespace, prompt)
    told = client.explain(namespace, tokens=prompt, identity=replace(IDENTITY, **{fact: "mine"}))
    assert told.blocks == 0
    assert [(each.digest, dict(each.differs)) for each in told.elsewhere] == [(namespace.digest, {fact: ""})]


def test_another_block_size_and_another_shard_are_found_with_their_own_chains(client: kinds.Client, prompt: list[int]) -> None:
    larger = replace(GEOMETRY, block_tokens=2 * BLOCK_TOKENS)
    here, coarse, shard = opened(client), opened(client, geometry=larger), opened(client, shard="tp0/2")
    store(client, coarse, prompt)
    store(client, shard, prompt, end=2)
    told = client.explain(here, tokens=prompt)
    assert [(each.digest, each.blocks, each.tokens) for each in told.elsewhere] == [
        (coarse.digest, 3, 6 * BLOCK_TOKENS),
        (shard.digest, 2, 2 * BLOCK_TOKENS),
    ]
    assert dict(told.elsewhere[0].differs) == {"block_tokens": str(2 * BLOCK_TOKENS)}
    hashes = block_hashes(here.root, prompt, BLOCK_TOKENS)
    by_hash = client.explain(here, hashes)  # of another block size the names are others
    assert [(each.digest, dict(each.differs)) for each in by_hash.elsewhere] == [(shard.digest, {"shard": "tp0/2"})]


def test_a_window_s_namespace_counts_though_its_first_blocks_are_gone(client: kinds.Client, prompt: list[int]) -> None:
    here = opened(client)
    window = client.open_namespace(IDENTITY, GEOMETRY, "", "window", Keep("window", 2 * BLOCK_TOKENS))
    store(client, window, prompt, first=4)
    told = client.explain(here, tokens=prompt)
    assert [(each.digest, each.blocks, dict(each.differs)) for each in told.elsewhere] == [(window.digest, 6, {"group": "window"})]


def test_less_or_as_much_elsewhere_is_not_worth_a_word(client: kinds.Client, prompt: list[int]) -> None:
    here, there = opened(client), opened(client, replace(IDENTITY, revision="another"))
    store(client, here, prompt, end=3)
    store(client, there, prompt, end=3)
    told = client.explain(here, tokens=prompt)
    assert (told.blocks, list(told.elsewhere)) == (3, [])


def test_a_gap_is_told_with_what_lies_behind_it(client: kinds.Client, prompt: list[int]) -> None:
    namespace = opened(client)
    store(client, namespace, prompt, end=2)
    store(client, namespace, prompt, first=3)
    told = client.explain(namespace, tokens=prompt)
    assert (told.blocks, told.reason, told.later_blocks) == (2, "not_stored", 3)


def test_a_block_that_is_being_written_and_one_that_was_removed(client: kinds.Client, prompt: list[int]) -> None:
    namespace = opened(client)
    with client.put(namespace, block_hashes(namespace.root, prompt, BLOCK_TOKENS)):
        assert client.explain(namespace, tokens=prompt).reason == "being_written"
    store(client, namespace, prompt)
    client.clear(namespace)
    assert client.explain(namespace, tokens=prompt).reason == "removed"


def test_what_was_evicted_is_told_as_such(tmp_path: Path, prompt: list[int]) -> None:
    with DaemonProcess(tmp_path, dram="8MiB", nvme=False) as daemon, KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        store(client, namespace, prompt)
        others = block_hashes(fingerprint(replace(IDENTITY, salt="others")), list(range(600 * BLOCK_TOKENS)), BLOCK_TOKENS)
        for start in range(0, len(others), 50 * HASH_BYTES):
            with client.put(namespace, others[start : start + 50 * HASH_BYTES], others[start - HASH_BYTES : start] or None) as put:
                for block in put.blocks:
                    block.done()
        assert client.stats().counters["evicted_dram"] > 0
        told = client.explain(namespace, tokens=prompt)
        assert (told.blocks, told.reason) == (0, "evicted")


def test_what_cannot_be_explained_is_refused(client: kinds.Client, prompt: list[int]) -> None:
    namespace = opened(client)
    for wrong in ({}, {"hashes": bytes(32), "tokens": prompt}, {"hashes": bytes(31)}):
        with pytest.raises(InvalidArgument):
            client.explain(namespace, **wrong)
    with pytest.raises(LimitExceeded, match="beginning"):
        client.explain(opened(client, geometry=replace(GEOMETRY, block_tokens=1024)), tokens=range(200_000))
    with pytest.raises(LimitExceeded, match=f"give the first {8192 * BLOCK_TOKENS} tokens"):
        client.explain(namespace, tokens=range(8194 * BLOCK_TOKENS))
    assert client.explain(namespace, tokens=[1, 2]).asked_blocks == 0


def test_namespaces_are_listed_with_their_facts_and_what_each_tier_has(client: kinds.Client, prompt: list[int]) -> None:
    here, shard = opened(client), opened(client, shard="tp1/2")
    store(client, here, prompt)
    store(client, shard, prompt, end=2)
    listed = {each.digest: each for each in client.namespaces().namespaces}
    assert listed[here.digest].blocks["dram"] == 6
    assert listed[shard.digest].blocks["dram"] == 2
    assert listed[shard.digest].facts["shard"] == "tp1/2"
    assert Geometry.from_fields(listed[here.digest].facts) == GEOMETRY
    assert listed[here.digest].slot_bytes == GEOMETRY.slot_bytes


# ---- at a terminal


def test_a_person_finds_out_why(daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], prompt: list[int]) -> None:
    with KVClient(daemon.address) as client:
        here, there = client.open_namespace(IDENTITY, GEOMETRY), client.open_namespace(replace(IDENTITY, revision="new"), GEOMETRY)
        store(client, there, prompt)
    at = ["--address", daemon.address]
    (tmp_path / "prompt").write_text(json.dumps(prompt))
    assert main(["namespaces", *at]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith(there.digest.hex()[:12])).split()[-2:] == ["new", IDENTITY.model]
    assert main(["explain", *at, "--namespace", here.digest.hex()[:12], "--tokens", str(tmp_path / "prompt")]) == 0
    told = capsys.readouterr().out
    assert "0 of 6 blocks (0 tokens) are found\nblock 0 is not" in told
    assert f"6 blocks ({6 * BLOCK_TOKENS} tokens) are found in namespace {there.digest.hex()[:12]}, where\n" in told
    assert f'  revision is "new", here it is "{IDENTITY.revision}"\n' in told
    assert main(["lookup", *at, "--namespace", there.digest.hex()[:12], "--tokens", str(tmp_path / "prompt")]) == 0
    assert json.loads(capsys.readouterr().out)["blocks"] == 6
    assert main(["clear", *at, "--namespace", there.digest.hex(), "--yes"]) == 0
    assert "cleared 6 blocks" in capsys.readouterr().out


def test_a_salt_at_the_terminal(daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], prompt: list[int]) -> None:
    with KVClient(daemon.address) as client:
        salted = client.open_namespace(replace(IDENTITY, salt="mine"), GEOMETRY)
        store(client, salted, prompt)
    asked = ["--address", daemon.address, "--namespace", salted.digest.hex(), "--tokens", str(tmp_path / "prompt")]
    (tmp_path / "prompt").write_text(json.dumps(prompt))
    assert main(["explain", *asked]) == 0
    told = capsys.readouterr().out
    assert told.startswith("0 of 6 blocks")
    assert "add --adapter or --salt" in told
    assert main(["explain", *asked, "--salt", "mine"]) == 0
    assert capsys.readouterr().out.startswith("6 of 6 blocks")
    assert main(["lookup", *asked, "--salt", "mine"]) == 0
    assert json.loads(capsys.readouterr().out)["blocks"] == 6


def test_tokens_do_not_tell_the_names_that_an_engine_gives(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], prompt: list[int]
) -> None:
    form = "sglang-0.5.1/layer_first/flat/and-so-on"
    with KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, replace(GEOMETRY, format=form, opaque_block_bytes=4096))
    at = ["--address", daemon.address]
    (tmp_path / "prompt").write_text(json.dumps(prompt))
    for command in ("explain", "lookup"):
        assert main([command, *at, "--namespace", namespace.digest.hex(), "--tokens", str(tmp_path / "prompt")]) == 2
        assert f"blocks of {form} are named by hashes of the engine's own" in capsys.readouterr().err
    assert main(["namespaces", *at]) == 0
    lines = capsys.readouterr().out.splitlines()
    starts = {line.rstrip().rindex(" ") for line in lines}  # the last column's, though names are of any length
    assert len(starts) == 1


@pytest.mark.parametrize(("text", "says"), [("Once upon", "'Once' is no token id"), ('[1, "x"]', "is no token id"), (None, "No such file")])
def test_a_prompt_s_file_that_holds_none(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, says: str
) -> None:
    if text is not None:
        (tmp_path / "prompt").write_text(text)
    assert main(["explain", "--address", daemon.address, "--namespace", "abcd", "--tokens", str(tmp_path / "prompt")]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1


def test_json_for_programs(daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], prompt: list[int]) -> None:
    with KVClient(daemon.address) as client:
        here = client.open_namespace(IDENTITY, GEOMETRY)
        store(client, client.open_namespace(IDENTITY, GEOMETRY, "tp0/2"), prompt, end=1)
    at = ["--address", daemon.address, "--json"]
    (tmp_path / "prompt").write_text(json.dumps(prompt))
    assert main(["explain", *at, "--namespace", here.digest.hex(), "--tokens", str(tmp_path / "prompt")]) == 0
    told = json.loads(capsys.readouterr().out)
    place = told["elsewhere"][0]
    assert (told["reason"], place["differs"], place["tokens"]) == ("not_stored", {"shard": "tp0/2"}, BLOCK_TOKENS)
    assert main(["namespaces", *at]) == 0
    listed = {each["digest"]: each for each in json.loads(capsys.readouterr().out)}
    assert listed[told["elsewhere"][0]["digest"]]["blocks"]["dram"] == 1


@pytest.mark.parametrize("command", [["explain", "--hashes", "/dev/null"], ["lookup", "--hashes", "/dev/null"], ["clear", "--yes"]])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--namespace", "abcd1234"], "0 namespaces begin with abcd1234"),
        (["--namespace", "ab"], "4 to 64 hexadecimal digits"),
        (["--namespace", "abcd", "--shard", "tp0/2"], "leave out --shard"),
        (["--dtype", "float16"], "give --identity and --geometry"),
        (["--identity", "/dev/null"], "give a file of JSON"),
    ],
)
def test_a_namespace_that_is_not_named_right(
    daemon: DaemonProcess, command: list[str], words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--address", daemon.address, *words]) == 2
    assert says in capsys.readouterr().err
