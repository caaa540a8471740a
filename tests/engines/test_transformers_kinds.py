"""Which models the transformers client serves and refuses, and what keeps their blocks apart. Small random models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvstore.clients.client import KVClient
from kvstore.clients.transformers import PrefixStore, identity_of
from kvstore.errors import GeometryError, InvalidArgument
from kvstore.testing.daemon import DaemonProcess
from tests.engines.hf import BLOCK, TOLERANCE, VOCABULARY, batch, generate, leave, logits_of, prompt

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2,
}  # fmt: skip
FEW_HEADS = SMALL | {"intermediate_size": 96, "num_key_value_heads": 2}
LATENT = FEW_HEADS | {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
SERVED: dict[str, dict[str, Any]] = {
    "LlamaConfig": FEW_HEADS | {"head_dim": 24},
    "Qwen3Config": FEW_HEADS | {"head_dim": 16},
    "GPT2Config": {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
    "BloomConfig": {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
    "DeepseekV2Config": LATENT,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "MistralConfig": (FEW_HEADS | {"sliding_window": 16}, "DynamicSlidingWindowLayer"),
    "Gemma3TextConfig": (FEW_HEADS | {"head_dim": 16, "sliding_window": 16}, "DynamicSlidingWindowLayer"),
    "MambaConfig": ({"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}, "LinearAttention"),
    "Qwen3NextConfig": (FEW_HEADS | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}, "LinearAttention"),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(nvme=False) as process:
        yield process


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[KVClient]:
    with KVClient(daemon.address) as made:
        yield made


def small(kind: str = "LlamaConfig", seed: int = 1, dtype: torch.dtype = torch.float32, **facts: Any) -> PreTrainedModel:
    """A random model of this kind."""
    torch.manual_seed(seed)
    given = SERVED[kind] if kind in SERVED else REFUSED[kind][0]
    config = getattr(transformers, kind)(**given, **facts)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    return ready(cast(Any, AutoModelForCausalLM).from_config(config).to(dtype))


def ready(model: PreTrainedModel) -> PreTrainedModel:
    cast(Any, model).eval()
    return model


@pytest.mark.parametrize("kind", SERVED)
def test_a_restored_prefix_gives_the_cold_logits(kind: str, client: KVClient) -> None:
    model = small(kind)
    prefixes = PrefixStore(model, client)
    ids, mask = batch([prompt(70), prompt(40, seed=1)])
    cold = prefixes.load(ids, mask)
    logits_of(model, ids, mask, cold)
    assert prefixes.store(cold).tokens == (64, 32)
    cache = prefixes.load(ids, mask)
    assert cache.hit_tokens == (62, 32)
    assert (logits_of(model, ids, mask, cache) - logits_of(model, ids, mask)).abs().max() <= TOLERANCE
    assert torch.equal(generate(model, ids, mask, prefixes.load(ids, mask)), generate(model, ids, mask))


def test_latent_attention_stores_the_latent_once(client: KVClient) -> None:
    geometry = PrefixStore(small("DeepseekV2Config"), client).geometry
    assert (geometry.kind, geometry.latent_dim, geometry.rope_dim) == ("mla", 32, 8)
    assert geometry.block_bytes == 2 * (32 + 8) * 4 * BLOCK


@pytest.mark.parametrize("kind", REFUSED)
def test_caches_that_are_something_else_are_refused(kind: str, client: KVClient) -> None:
    with pytest.raises(InvalidArgument, match=rf"{REFUSED[kind][1]}.*without the store"):
        PrefixStore(small(kind), client)


def test_layers_that_differ_are_refused(client: KVClient) -> None:
    model = small()
    attention = model.model.layers[1].self_attn
    attention.k_proj, attention.v_proj = (torch.nn.Linear(64, 4 * 24) for _ in range(2))
    attention.num_key_value_groups = 1
    with pytest.raises(GeometryError, match="differ"):
        PrefixStore(model, client)


def test_encoders_and_multimodal_models_are_refused(client: KVClient) -> None:
    text = transformers.LlamaConfig(**SERVED["LlamaConfig"])
    vision = transformers.CLIPVisionConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=28)
    both = transformers.LlavaConfig(vision_config=vision, text_config=text)
    with pytest.raises(InvalidArgument, match="multimodal"):
        PrefixStore(ready(transformers.LlavaForConditionalGeneration(both)), client)
    two = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(InvalidArgument, match="decoder"):
        PrefixStore(ready(transformers.T5ForConditionalGeneration(two)), client)


def test_a_rope_that_depends_on_the_length_is_refused(client: KVClient) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(InvalidArgument, match="dynamic"):
        PrefixStore(small(rope_parameters=rope), client)


def test_training_mode_is_refused(client: KVClient) -> None:
    model = small()
    prefixes = PrefixStore(model, client)
    cache = prefixes.load(*batch([prompt(20)]))
    model.train()
    for call in (lambda: PrefixStore(model, client), lambda: prefixes.store(cache), lambda: prefixes.load(*batch([prompt(20)]))):
        with pytest.raises(InvalidArgument, match=r"eval\(\)"):
            call()


def test_what_differs_in_a_fact_shares_nothing(client: KVClient) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    tokens = prompt(40)
    everyone = [
        PrefixStore(small(seed=11), client),
        PrefixStore(small(seed=12), client),
        PrefixStore(small(seed=11, dtype=torch.bfloat16), client),
        PrefixStore(small(seed=11, rope_parameters=rope), client),
        PrefixStore(small(seed=11, rms_norm_eps=1e-3), client),
        PrefixStore(small(seed=11), client, block_tokens=8),
    ]
    facts: list[dict[str, Any]] = [{}, {"salt": "a"}, {"salt": "b"}, {"adapter": "a"}, {"adapter": "b"}]
    for prefixes in everyone:
        for each in facts:
            assert leave(prefixes, tokens, **each).hit_tokens == (0,)
    for prefixes in everyone:
        for each in facts:
            assert prefixes.load(*batch([tokens]), **each).hit_tokens == (32,)
    assert PrefixStore(small(seed=11), client).load(*batch([tokens])).hit_tokens == (32,)


def test_models_in_turn_each_get_their_own(client: KVClient) -> None:
    models = [small(seed=21), small(seed=22), small(seed=21, dtype=torch.bfloat16)]
    ids, mask = batch([prompt(50, seed=2)])
    for _ in range(3):
        for model in models:
            prefixes = PrefixStore(model, client)
            cache = prefixes.load(ids, mask)
            logits = logits_of(model, ids, mask, cache)
            prefixes.store(cache)
            if model.dtype == torch.float32:
                assert (logits - logits_of(model, ids, mask)).abs().max() <= TOLERANCE


def test_the_same_weights_have_the_same_identity(tmp_path: Path) -> None:
    model = small()
    model.save_pretrained(tmp_path)
    again = ready(AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True))
    assert identity_of(again) == identity_of(model)
    with torch.no_grad():
        again.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    assert identity_of(again).revision != identity_of(model).revision


def test_a_given_identity_must_be_the_model_s(client: KVClient) -> None:
    model = small()
    named = identity_of(model, name="mine", revision="commit 1")
    assert (named.model, named.revision) == ("mine", "commit 1")
    PrefixStore(model, client, named)
    for wrong in (replace(named, dtype="bfloat16"), replace(named, position="")):
        with pytest.raises(InvalidArgument, match="give the model's"):
            PrefixStore(model, client, wrong)


def test_a_model_with_adapters_needs_to_say_which(client: KVClient) -> None:
    model = small()
    prefixes = PrefixStore(model, client)
    cast(Any, model).peft_config = {"default": object()}  # as the library that attaches them does
    with pytest.raises(InvalidArgument, match="adapter="):
        prefixes.load(*batch([prompt(20)]))
    assert prefixes.load(*batch([prompt(20)]), adapter="sha256:1").fault == ""
