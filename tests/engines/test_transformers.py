"""The real model through the transformers client: a restored prefix gives the logits and the answer of a cold run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kvstore.clients.client import KVClient
from kvstore.clients.transformers import PrefixStore
from kvstore.hashing import usable_blocks
from kvstore.testing.daemon import DaemonProcess
from kvstore.worker.engine import Engine
from kvstore.worker.model import LoadedModel, load_model
from kvstore.worker.requests import Request
from tests.engines.hf import BLOCK, MADE, TOLERANCE, answer, batch, generate, leave, logits_of, prompt, until_on_disk

LENGTHS = [blocks * BLOCK + beside for blocks in (1, 4) for beside in (-1, 0, 1)]
OTHER_PROCESS = """
import json, sys, torch
from kvstore.clients.client import KVClient
from kvstore.clients.transformers import PrefixStore
from kvstore.worker.model import load_model
from tests.engines.hf import batch, generate
with KVClient(sys.argv[1]) as client:
    model = load_model(dtype=torch.float32).model
    prefixes = PrefixStore(model, client)
    ids, mask = batch([json.loads(sys.argv[2])])
    cache = prefixes.load(ids, mask)
    print(json.dumps([cache.hit_tokens[0], generate(model, ids, mask, cache)[0].tolist()]))
"""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """SmolLM2 in fp32."""
    torch.set_num_threads(1)
    return load_model(dtype=torch.float32)


@pytest.fixture(scope="module")
def model(loaded: LoadedModel) -> PreTrainedModel:
    return loaded.model


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(dram="96MiB", nvme_bytes="128MiB") as process:
        yield process


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[KVClient]:
    with KVClient(daemon.address) as made:
        yield made


def assert_warm(prefixes: PrefixStore, tokens: list[int]) -> None:
    """The logits and the answer over the stored prefix are those of a cold run, and the prefix is as long as it may be."""
    ids, mask = batch([tokens])
    cold, made = answer(prefixes.model, ids, mask)
    cache = prefixes.load(ids, mask)
    assert cache.fault == ""
    assert cache.hit_tokens == (usable_blocks(len(tokens), BLOCK) * BLOCK,)
    assert cache.get_seq_length() == cache.hit_tokens[0]
    warm, again = answer(prefixes.model, ids, mask, cache)
    assert (warm - cold).abs().max() <= TOLERANCE
    assert again == made


def test_prompts_around_whole_blocks_give_the_cold_answer(model: PreTrainedModel, daemon: DaemonProcess) -> None:
    with KVClient(daemon.address) as client:
        first = PrefixStore(model, client)
        for length in LENGTHS:
            leave(first, prompt(length, seed=length))
    with KVClient(daemon.address) as client:
        second = PrefixStore(model, client)
        for length in LENGTHS:
            assert_warm(second, prompt(length, seed=length))


def test_a_daemon_killed_and_started_again_gives_the_cold_answer(model: PreTrainedModel, daemon: DaemonProcess) -> None:
    tokens = [prompt(length, seed=100 + length) for length in LENGTHS[3:]]
    with KVClient(daemon.address) as client:
        prefixes = PrefixStore(model, client)
        for each in tokens:
            leave(prefixes, each)
        until_on_disk(daemon)
        daemon.restart()
        for each in tokens:
            assert_warm(prefixes, each)


def test_another_process_gives_the_cold_answer(model: PreTrainedModel, daemon: DaemonProcess, client: KVClient) -> None:
    tokens = prompt(4 * BLOCK + 1, seed=200)
    prefixes = PrefixStore(model, client)
    leave(prefixes, tokens)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", OTHER_PROCESS, daemon.address, json.dumps(tokens)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    hit_tokens, made = json.loads(done.stdout)
    assert hit_tokens == 4 * BLOCK
    assert made == generate(model, *batch([tokens]))[0].tolist()


def test_an_answer_is_part_of_the_next_prompt(model: PreTrainedModel, client: KVClient) -> None:
    prefixes = PrefixStore(model, client)
    ids, mask = batch([prompt(2 * BLOCK - 3, seed=300)])
    cache = prefixes.load(ids, mask)
    made = generate(model, ids, mask, cache)
    assert prefixes.store(cache, made).tokens == (2 * BLOCK,)
    longer = [*made[0].tolist(), *prompt(4, seed=301)]
    assert_warm(prefixes, longer)


def test_a_batch_takes_what_every_row_can_fill(model: PreTrainedModel, client: KVClient) -> None:
    prefixes = PrefixStore(model, client)
    known = [prompt(length, seed=400 + length) for length in (65, 40, 70)]
    for tokens in known:
        leave(prefixes, tokens)
    ids, mask = batch(known)
    cold, made = answer(model, ids, mask)
    cache = prefixes.load(ids, mask)
    assert cache.hit_tokens == (57, 32, 62)  # 30 columns of padding and 32 tokens of the shortest are 62
    assert cache.get_seq_length() == 62
    warm, again = answer(model, ids, mask, cache)
    assert (warm - cold).abs().max() <= TOLERANCE
    assert again == made
    assert prefixes.store(cache, torch.tensor(again)).tokens == tuple((len(tokens) + MADE - 1) // BLOCK * BLOCK for tokens in known)
    for tokens, columns in zip(known, made, strict=True):
        whole = [*tokens, *columns[-MADE:]]
        assert prefixes.load(*batch([whole])).hit_tokens == (usable_blocks(len(whole), BLOCK) * BLOCK,)


def test_a_row_that_misses_costs_the_others_only_its_tokens(model: PreTrainedModel, client: KVClient) -> None:
    prefixes = PrefixStore(model, client)
    known, unknown = prompt(60, seed=500), prompt(20, seed=501)
    leave(prefixes, known)
    ids, mask = batch([known, unknown])
    cache = prefixes.load(ids, mask)
    assert cache.hit_tokens == (40, 0)
    assert (logits_of(model, ids, mask, cache) - logits_of(model, ids, mask)).abs().max() <= TOLERANCE
    assert prefixes.load(*batch([unknown, known, prompt(60, seed=502)])).get_seq_length() == 0


def test_the_worker_and_transformers_share(loaded: LoadedModel, client: KVClient) -> None:
    tokens = prompt(3 * BLOCK + 2, seed=600)
    store = client.open_blocks(loaded.identity, loaded.geometry())
    engine = Engine(loaded, store)
    made = engine.generate([Request(tokens, MADE)])[0].tokens
    assert store.flush(10)
    engine.close()
    store.close()
    prefixes = PrefixStore(loaded.model, client, loaded.identity)
    ids, mask = batch([tokens])
    cache = prefixes.load(ids, mask)
    assert cache.hit_tokens == (3 * BLOCK,)
    assert (logits_of(loaded.model, ids, mask, cache) - logits_of(loaded.model, ids, mask)).abs().max() <= TOLERANCE
    assert generate(loaded.model, ids, mask, min_new_tokens=1)[0, len(tokens) :].tolist() == made
