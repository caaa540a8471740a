"""With the CPU kernels on, every kind still gives what transformers' own `generate` gives, token for token, in fp32."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import transformers

from kvstore.kernels.cpu import Prompt, available, instruction_sets
from kvstore.kernels.cpu.library import find
from kvstore.worker.model import LoadedModel, load_model
from kvstore.worker.native import Native, native_for
from kvstore.worker.paged import PagedCache
from kvstore.worker.rows import RowLayout
from kvstore.worker.standalone import StandaloneStore
from tests.worker.kinds import KINDS, WINDOW, expected, load
from tests.worker.steps import forward, greedy, start
from tests.worker.stores import prompt, small_store

pytestmark = pytest.mark.skipif(bool(available()), reason=f"no CPU kernels: {available()}")
TOKENS = 14  # made by each run: across the end of a block
LONG = 3 * WINDOW + 8  # tokens of a prompt that no window can hold
TOLERANCE = 1e-4  # of logits up to about 10 in fp32


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def cache_of(loaded: LoadedModel) -> PagedCache:
    return PagedCache(small_store(loaded, 128), native=True)


@pytest.mark.parametrize("chunk", [4])
def test_tokens_are_what_generate_makes(kind: str, chunk: int) -> None:
    loaded, cache = load(kind), cache_of(load(kind))
    assert cache.native is not None
    prompts = [prompt(LONG), prompt(9, seed=3), prompt(33, seed=5), [7]]
    wanted = [expected(loaded, tokens, TOKENS) for tokens in prompts]
    for _ in range(2):
        assert greedy(loaded, cache, prompts, TOKENS, chunk) == wanted
    cache.close()


def test_a_single_token_s_logits_are_those_of_transformers(kind: str) -> None:
    loaded, cache = load(kind), cache_of(load(kind))
    tokens = prompt(LONG)
    with torch.inference_mode():
        wanted = cast(Any, loaded.model)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    sequence, other = start(loaded, cache, tokens), start(loaded, cache, prompt(30, seed=4))
    forward(loaded, cache, [(sequence, LONG - 2), (other, 5)])
    # Between two parts of several tokens, and with a row on either side.
    third = start(loaded, cache, prompt(20, seed=6))
    found = forward(loaded, cache, [(third, 1), (other, 3), (sequence, 1), (start(loaded, cache, prompt(4, seed=8)), 4)])
    assert (found[2] - wanted[LONG - 2]).abs().max() <= TOLERANCE
    found = forward(loaded, cache, [(third, 1), (sequence, 1)])
    assert (found[1] - wanted[LONG - 1]).abs().max() <= TOLERANCE
    cache.close()


def test_the_kernels_are_asked_for_single_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, cache = load("gemma2"), cache_of(load("gemma2"))
    asked: list[int] = []
    kernel = cast(Native, cache.native).kernel(4)
    real = kernel.reading

    def reading(tables: Any, lengths: Any) -> Any:
        asked.append(len(tables))
        return real(tables, lengths)

    monkeypatch.setattr(kernel, "reading", reading)
    greedy(loaded, cache, [prompt(20), prompt(30, seed=2)], 4, chunk=25)
    assert asked == [1, 2, 2, 1]  # 20 + 25 tokens; one beside five; two alone; the one that began later
    cache.close()


def test_without_the_library_torch_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load("llama")
    monkeypatch.setattr("kvstore.worker.native.available", lambda: "it was not built")
    cache = cache_of(loaded)
    assert cache.native is None
    assert greedy(loaded, cache, [prompt(20)], 5) == [expected(loaded, prompt(20), 5)]
    cache.close()


def test_a_type_that_the_kernels_do_not_have_is_left_to_torch() -> None:
    config = transformers.LlamaConfig()
    geometry = load("llama").geometry(8)
    assert native_for(RowLayout(geometry)) is not None
    double = type(geometry).from_hf_config(config.to_dict(), "float64", 8)
    assert native_for(RowLayout(double)) is None


def test_the_real_model_on_real_text_makes_generate_s_tokens() -> None:
    loaded = load_model(dtype=torch.float32)
    text = "The lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote down what the sea had brought. One night"
    prompts = [loaded.encode(text * 3), loaded.encode(text)]
    cache = PagedCache(StandaloneStore(loaded.identity, loaded.geometry(), 64 << 20), native=True)
    assert greedy(loaded, cache, prompts, 12, chunk=64) == [expected(loaded, tokens, 12) for tokens in prompts]
    cache.close()


def test_prompts_in_bfloat16_attend_through_the_kernels_and_near_what_torch_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    library, _ = find()
    if library is None or "avx512_bf16" not in instruction_sets(library):
        pytest.skip("this processor has no products of bfloat16")
    loaded = load_model(dtype=torch.bfloat16)
    text = "The lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote down what the sea had brought. "
    tokens = loaded.encode(text * 12)
    ends = [100, 101, 200, len(tokens)]
    served: list[bool] = []
    real = Prompt.attend

    def attend(prompt: Prompt, *args: Any, **options: Any) -> bool:
        served.append(real(prompt, *args, **options))
        return served[-1]

    monkeypatch.setattr(Prompt, "attend", attend)
    found = []
    for native in (True, False):
        cache = PagedCache(StandaloneStore(loaded.identity, loaded.geometry(), 64 << 20), native=native)
        sequence = start(loaded, cache, tokens)
        found.append([forward(loaded, cache, [(sequence, end - begin)])[0] for begin, end in zip([0, *ends], ends, strict=False)])
        cache.close()
    assert served == [True] * (3 * len(cast(Any, loaded.model).model.layers)), "three of the four steps have several new tokens"
    for mine, torchs in zip(*found, strict=True):
        apart = (mine.float() - torchs.float()).abs().max().item()
        assert 0 < apart < 0.05 * torchs.float().abs().max().item()
        assert mine.argmax() == torchs.argmax()
