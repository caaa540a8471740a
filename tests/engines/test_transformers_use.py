"""How the transformers client is called wrongly, and what it does while the store is in trouble."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvstore.clients.client import KVClient
from kvstore.clients.patience import AWAY_S
from kvstore.clients.transformers import PrefixCache, PrefixStore, identity_of
from kvstore.errors import InvalidArgument, Unavailable
from kvstore.testing.daemon import DaemonProcess
from tests.engines.hf import BLOCK, TOLERANCE, batch, generate, leave, logits_of, prompt
from tests.engines.test_transformers_kinds import small


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.set_num_threads(1)
    return small(seed=31)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as process:
        yield process


@pytest.fixture
def prefixes(model: PreTrainedModel, daemon: DaemonProcess) -> Iterator[PrefixStore]:
    with KVClient(daemon.address) as client:
        yield PrefixStore(model, client)


@pytest.mark.parametrize(
    ("ids", "mask", "says"),
    [
        ([[1, 2, 3]], [[1, 1, 0]], "left"),
        ([[1, 2, 3]], [[1, 0, 1]], "left"),
        ([[1, 2, 3], [1, 2, 3]], [[0, 0, 1], [0, 0, 0]], "row 1 has no token"),
        ([[1, 2, 3]], [[1, 1]], "shape"),
        ([1, 2, 3], None, "columns"),
        ([[0.5]], None, "integers"),
    ],
)
def test_prompts_that_make_no_batch_are_refused(prefixes: PrefixStore, ids: Any, mask: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        prefixes.load(torch.tensor(ids), None if mask is None else torch.tensor(mask))


def test_without_a_mask_nothing_is_padding(prefixes: PrefixStore) -> None:
    leave(prefixes, prompt(20))
    assert prefixes.load(torch.tensor([prompt(20)])).hit_tokens == (16,)


def test_a_prompt_of_one_token_works(prefixes: PrefixStore, model: PreTrainedModel) -> None:
    for _ in range(2):
        cache = prefixes.load(torch.tensor([[7]]))
        made = generate(model, torch.tensor([[7]]), torch.tensor([[1]]), cache)
        assert torch.equal(made, generate(model, torch.tensor([[7]]), torch.tensor([[1]])))
        assert prefixes.store(cache, made).tokens == (0,)


def test_sequences_of_other_prompts_are_refused(prefixes: PrefixStore, model: PreTrainedModel) -> None:
    ids, mask = batch([prompt(20, seed=1), prompt(30, seed=2)])
    cache = prefixes.load(ids, mask)
    made = generate(model, ids, mask, cache)
    for wrong in (made.flip(0), made[:1], made[:, 1:], made[0]):
        with pytest.raises(InvalidArgument, match="sequence"):
            prefixes.store(cache, wrong)
    assert prefixes.load(ids, mask).hit_tokens == (0, 0)


def test_caches_of_unknown_tokens_are_refused(prefixes: PrefixStore, model: PreTrainedModel) -> None:
    ids, mask = batch([prompt(20, seed=3)])
    with pytest.raises(InvalidArgument, match=r"load\(\)"):
        prefixes.store(DynamicCache(config=model.config), ids)  # type: ignore[arg-type]
    cache = prefixes.load(ids, mask)
    logits_of(model, ids, mask, cache)
    layer: Any = cache.layers[1]
    layer.keys = layer.keys[..., :-1, :]
    with pytest.raises(InvalidArgument, match="layer 1"):
        prefixes.store(cache)


def test_of_a_beam_search_only_prompts_are_stored(prefixes: PrefixStore, model: PreTrainedModel) -> None:
    tokens = prompt(3 * BLOCK - 2, seed=4)
    ids, mask = batch([tokens])
    cache = prefixes.load(ids, mask)
    cache.batch_repeat_interleave(3)
    made = generate(model, ids, mask, cache, num_beams=3, num_return_sequences=3, max_new_tokens=2 * BLOCK)
    assert cache.rearranged
    assert prefixes.store(cache, made).tokens == (2 * BLOCK,) * 3
    for sequence in made.tolist():
        ids, mask = batch([sequence])
        warm = prefixes.load(ids, mask)
        assert warm.hit_tokens == (2 * BLOCK,)
        assert (logits_of(model, ids, mask, warm) - logits_of(model, ids, mask)).abs().max() <= TOLERANCE


def test_several_answers_to_a_prompt_are_stored_each(prefixes: PrefixStore, model: PreTrainedModel) -> None:
    ids, mask = batch([prompt(2 * BLOCK, seed=5)])
    leave(prefixes, prompt(2 * BLOCK, seed=5))
    cache = prefixes.load(ids, mask)
    cache.batch_repeat_interleave(3)
    torch.manual_seed(5)
    made = generate(model, ids, mask, cache, do_sample=True, num_return_sequences=3, max_new_tokens=2 * BLOCK, min_new_tokens=2 * BLOCK)
    assert prefixes.store(cache, made).tokens == (3 * BLOCK,) * 3
    for sequence in made.tolist():
        ids, mask = batch([sequence])
        warm = prefixes.load(ids, mask)
        assert warm.hit_tokens == (3 * BLOCK,)
        assert (logits_of(model, ids, mask, warm) - logits_of(model, ids, mask)).abs().max() <= TOLERANCE


def test_padding_behind_an_answer_is_not_stored(prefixes: PrefixStore, model: PreTrainedModel) -> None:
    ids, mask = batch([prompt(BLOCK, seed=6)])
    cache = prefixes.load(ids, mask)
    model.generation_config.pad_token_id = 2
    try:
        text = torch.cat([ids, torch.full((1, 3 * BLOCK), 2)], dim=1)
        logits_of(model, text, torch.ones_like(text), cache)
        assert prefixes.store(cache, text).tokens == (BLOCK,)
    finally:
        model.generation_config.pad_token_id = None


def test_chunked_prefill_and_drafts_store_what_was_accepted(prefixes: PrefixStore, model: PreTrainedModel) -> None:
    settings: list[dict[str, Any]] = [{"prefill_chunk_size": 7}, {"prompt_lookup_num_tokens": 3}]
    for seed, setting in enumerate(settings, 7):
        tokens = prompt(2 * BLOCK + 3, seed) * 2
        ids, mask = batch([tokens])
        cache = prefixes.load(ids, mask)
        made = generate(model, ids, mask, cache, max_new_tokens=BLOCK, min_new_tokens=1, **setting)
        done = prefixes.store(cache, made).tokens[0]
        assert done == (made.shape[1] - 1) // BLOCK * BLOCK
        longer, mask = batch([[*made[0].tolist(), 9]])
        warm = prefixes.load(longer, mask)
        assert warm.hit_tokens == (done,)
        assert (logits_of(model, longer, mask, warm) - logits_of(model, longer, mask)).abs().max() <= TOLERANCE


def test_without_a_daemon_answers_stay_right_and_soon(model: PreTrainedModel, daemon: DaemonProcess) -> None:
    ids, mask = batch([prompt(40, seed=10)])
    answer = generate(model, ids, mask)
    with KVClient(daemon.address) as client:
        prefixes = PrefixStore(model, client)
        leave(prefixes, prompt(40, seed=10))
        daemon.kill9()
        for most_s in (10.0, 1.0):  # the second one is not kept waiting for what the first one has found
            began_at = time.monotonic()
            cache = prefixes.load(ids, mask)
            assert "Unavailable" in cache.fault
            assert time.monotonic() - began_at < most_s
            assert torch.equal(generate(model, ids, mask, cache), answer)
            assert "Unavailable" in prefixes.store(cache).fault
        daemon.start()
        time.sleep(AWAY_S)
        cache = prefixes.load(ids, mask)
        logits_of(model, ids, mask, cache)
        assert prefixes.store(cache).tokens == (32,)
        assert prefixes.load(ids, mask).hit_tokens == (32,)


def test_a_daemon_killed_while_blocks_are_read_changes_no_answer(
    prefixes: PrefixStore, model: PreTrainedModel, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(60, seed=11)
    leave(prefixes, tokens)
    ids, mask = batch([tokens])
    gathered: Callable[..., Any] = prefixes._gathered

    def strike(*arguments: Any) -> Any:
        daemon.restart()
        with KVClient(daemon.address) as other:
            space = other.open_namespace(prefixes.identity, prefixes.geometry)
            filling = b"".join(bytes([each % 256, each // 256]) * 16 for each in range(4000))
            with other.put(space, filling) as put:
                for block in put.blocks:
                    block.view[:] = 0x41
        return gathered(*arguments)

    monkeypatch.setattr(prefixes, "_gathered", strike)
    cache: PrefixCache = prefixes.load(ids, mask)
    assert (logits_of(model, ids, mask, cache) - logits_of(model, ids, mask)).abs().max() <= TOLERANCE


def test_where_the_arena_cannot_be_mapped_blocks_go_over_grpc(
    prefixes: PrefixStore, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise Unavailable("no shared memory with that machine")

    monkeypatch.setattr("kvstore.clients.link.Arena", refuse)
    tokens = prompt(60, seed=12)
    leave(prefixes, tokens)
    ids, mask = batch([tokens])
    cache = prefixes.load(ids, mask)
    assert prefixes._client._attached is None
    assert cache.hit_tokens == (48,)
    assert (logits_of(model, ids, mask, cache) - logits_of(model, ids, mask)).abs().max() <= TOLERANCE


def _in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        cast(Any, model).model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3


def _merged(model: PreTrainedModel) -> None:
    for layer in cast(Any, model).model.layers:
        layer.self_attn.q_proj.weight.data += 0.05  # as those who merge adapters do: autograd counts nothing


def _replaced(model: PreTrainedModel) -> None:
    projection = cast(Any, model).model.layers[0].self_attn.v_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach() * 1.1)


def _cast(model: PreTrainedModel) -> None:
    cast(Any, model).half()


def _cast_and_back(model: PreTrainedModel) -> None:
    cast(Any, model).half().float()


@pytest.mark.parametrize("change", [_in_place, _merged, _replaced, _cast, _cast_and_back])
def test_weights_that_have_changed_neither_load_nor_store(
    change: Callable[[PreTrainedModel], None], daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    model, (ids, mask) = small(seed=33), batch([prompt(60, seed=33)])
    with KVClient(daemon.address) as client:
        client.clear()
        prefixes = PrefixStore(model, client)
        leave(prefixes, prompt(60, seed=33))
        before = prefixes.load(ids, mask)
        assert before.hit_tokens == (48,)
        change(model)
        for _ in range(2):
            cache = prefixes.load(ids, mask)
            assert (cache.hit_tokens, cache.get_seq_length()) == ((0,), 0)
            assert "make a new PrefixStore" in cache.fault
        logits_of(model, ids, mask, cache)
        for unstored in (cache, before):
            assert prefixes.store(unstored).tokens == (0,)
            assert "make a new PrefixStore" in prefixes.store(unstored).fault
        assert sum("make a new PrefixStore" in record.message for record in caplog.records) == 1
        anew = PrefixStore(model, client)
        assert leave(anew, prompt(60, seed=33)).hit_tokens == (0,)
        assert anew.load(ids, mask).hit_tokens == (48,)


def test_a_buffer_that_has_changed_is_seen(daemon: DaemonProcess) -> None:
    model = small(seed=35)
    with KVClient(daemon.address) as client:
        prefixes = PrefixStore(model, client)
        cast(Any, model).model.rotary_emb.inv_freq.mul_(0.5)
        assert "have changed" in prefixes.load(*batch([prompt(20)])).fault


def test_adapters_that_come_and_go_beside_the_weights_are_no_change(daemon: DaemonProcess) -> None:
    class Adapted(torch.nn.Module):  # as the library that attaches them does
        adapter_layer_names = ("lora_A",)

        def __init__(self, base: torch.nn.Module) -> None:
            super().__init__()
            self.base_layer, self.lora_A = base, torch.nn.ModuleDict({"default": torch.nn.Linear(4, 4)})

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, self.base_layer(given))

    model = small(seed=34)
    attention = cast(Any, model).model.layers[0].self_attn
    with KVClient(daemon.address) as client:
        prefixes = PrefixStore(model, client)
        attention.q_proj = Adapted(attention.q_proj)
        cast(Any, model).peft_config = {"default": object()}
        assert prefixes.load(*batch([prompt(20)]), adapter="sha256:1").fault == ""
        later = PrefixStore(model, client, identity_of(model, revision="1"))
        with torch.no_grad():
            attention.q_proj.lora_A["default"].weight += 1
        assert later.load(*batch([prompt(20)]), adapter="sha256:2").fault == ""
        with torch.no_grad():
            attention.q_proj.base_layer.weight += 1
        assert "have changed" in later.load(*batch([prompt(20)]), adapter="sha256:2").fault


def test_a_store_with_no_room_for_a_block_changes_no_answer(model: PreTrainedModel) -> None:
    ids, mask = batch([prompt(20)])
    with DaemonProcess(nvme=False, dram="16MiB") as small_daemon, KVClient(small_daemon.address) as client:
        prefixes = PrefixStore(model, client, block_tokens=16_384)
        cache = prefixes.load(ids, mask)
        made = generate(model, ids, mask, cache)
        stored = prefixes.store(cache, made)
    assert cache.hit_tokens == (0,)
    assert "exceeds an extent" in cache.fault
    assert stored.tokens == (0,)
    assert stored.fault
    assert torch.equal(made, generate(model, ids, mask))
