"""Where models come from, and under which names their blocks are shared."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore import digests
from kvstore.errors import ConfigError, InvalidArgument
from kvstore.hashing import fingerprint
from kvstore.model_config import position_facts
from kvstore.worker import bundled
from kvstore.worker.engine import Engine
from kvstore.worker.model import LoadedModel, load_model, prepare
from kvstore.worker.plain import generate_plain
from kvstore.worker.requests import Request
from tests.worker.stores import prompt, small_store


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test's own, unless it wants the bundled model."""
    if "smol" not in request.fixturenames:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tiny: LoadedModel, tmp_path: Path) -> Path:
    """The tiny model as a folder."""
    place = tmp_path / "tiny-llama"
    tiny.model.save_pretrained(place)
    return place


def change(folder: Path, **facts: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def test_the_bundled_model_is_the_one_it_says(smol: LoadedModel) -> None:
    assert smol.identity.model == "SmolLM2-135M-Instruct"
    assert smol.identity.dtype == "bfloat16"
    assert json.loads(smol.identity.position)["rope_theta"] == 100_000
    assert smol.geometry().block_bytes == 30 * 2 * 3 * 64 * 2 * 16
    assert smol.decode(smol.encode("Call me Ishmael.")) == "Call me Ishmael."


def test_processes_that_race_convert_once_and_see_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def slow(_: Path, folder: Path) -> None:
        made.append(folder)
        time.sleep(0.2)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(bundled, "_convert", slow)
    seen: list[bool] = []

    def want() -> None:
        seen.append((bundled.bundled_folder() / "config.json").is_file())

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 4
    assert len(made) == 1


def test_a_conversion_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("kvstore.worker.bundled.AutoModelForCausalLM.from_pretrained", broken)
    with pytest.raises(RuntimeError):
        bundled.bundled_folder()
    left = [path for path in (digests.cache_folder() / "models").iterdir() if path.suffix != ".lock"]
    assert left == []


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(bundled, "file_digest", lambda path: "0" * 64)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        bundled.bundled_folder()


def test_a_local_folder_is_served_like_the_model_it_holds(tiny: LoadedModel, folder: Path) -> None:
    loaded = load_model(folder)
    engine = Engine(loaded, small_store(loaded))
    assert engine.generate([Request(prompt(20), 9)])[0].tokens == generate_plain(tiny, prompt(20), 9).tokens
    assert loaded.identity.model == "tiny-llama"
    engine.close()


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "config", ["{}", "[]", "{", '{"model_type": "llama", "hidden_size": "x"}', '{"model_type": "none"}', '{"model_type": "llama"}']
)
def test_a_folder_whose_model_cannot_be_loaded_is_named(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match="cannot be loaded") as refused:
        load_model(tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_model_without_a_tokenizer_takes_ids_only(tiny: LoadedModel) -> None:
    with pytest.raises(InvalidArgument, match="tokenizer"):
        tiny.encode("hello")


def test_the_same_files_elsewhere_have_the_same_revision(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / folder.name
    other.parent.mkdir()
    folder.rename(other)
    before = load_model(other).identity
    other.rename(folder)
    change(folder, _name_or_path="somewhere else", transformers_version="9")
    assert load_model(folder).identity == before


@pytest.mark.parametrize("changed", ["weights", "config"])
def test_a_changed_model_has_another_revision(folder: Path, changed: str) -> None:
    before = load_model(folder).identity
    if changed == "config":
        change(folder, rms_norm_eps=1e-3)
    else:
        weights = folder / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    after = load_model(folder).identity
    assert after.revision != before.revision
    assert fingerprint(after) != fingerprint(before)


def test_another_dtype_is_another_identity(folder: Path) -> None:
    half = load_model(folder, torch.bfloat16)
    assert half.identity.dtype == "bfloat16"
    assert half.geometry().dtype == "bfloat16"
    assert half.identity != load_model(folder).identity


def test_a_digest_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first = digests.file_digest(path)
    with monkeypatch.context() as patched:
        patched.setattr(digests, "READ_BYTES", 0)  # would now hash nothing
        assert digests.file_digest(path) == first
    path.write_bytes(b"two")
    assert digests.file_digest(path) != first


def test_every_rope_parameter_is_in_the_position() -> None:
    plain = position_facts(LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e4}))
    scaled = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048}
    yarn = [position_facts(LlamaConfig(rope_parameters=scaled, max_position_embeddings=length)) for length in (8192, 16384)]
    assert len({plain, *yarn}) == 3
    assert json.loads(yarn[0])["factor"] == 4.0


def test_a_model_whose_keys_depend_on_the_length_is_refused(folder: Path) -> None:
    change(folder, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(InvalidArgument, match="dynamic"):
        load_model(folder)


def test_layers_that_keep_something_else_are_refused(tiny: LoadedModel) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(InvalidArgument, match="linear_attention"):
        prepare(model, replace(tiny.identity, model="mixed"))
