"""Loads a model from a folder, and says under which identity and geometry its keys and values may be shared."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from kvstore import digests
from kvstore.errors import ConfigError, InvalidArgument
from kvstore.geometry import Geometry
from kvstore.hashing import Identity
from kvstore.model_config import position_facts
from kvstore.worker import attention, bundled
from kvstore.worker.kinds import reason_of_trial, reason_to_refuse

BLOCK_TOKENS = 16  # tokens: 360 KiB a block for the bundled model; half a block is computed again on an average hit
MAX_REASON_CHARS = 300  # characters: a line or two of a library's reason, which may name every kind of model that it knows
# What decides which token ids a text becomes; a folder has some of these.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what the store must know of it. `tokenizer` is None where the folder has none."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    identity: Identity
    eos: frozenset[int]

    def geometry(self, block_tokens: int = BLOCK_TOKENS) -> Geometry:
        """The layout of its blocks."""
        return Geometry.from_hf_config(self.model.config.to_dict(), self.identity.dtype, block_tokens)

    def identity_for(self, salt: str) -> Identity:
        """The identity of a request that shares KV only with requests of the same salt."""
        return replace(self.identity, salt=salt)

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the model takes, prompt and answer."""
        return int(getattr(self.model.config, "max_position_embeddings", 2**31))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it stands: no template is put around it."""
        return [int(token) for token in self._tokenizer.encode(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise InvalidArgument(f"model {self.identity.model} has no tokenizer in its folder; give token ids")
        return self.tokenizer


def load_model(folder: Path | None = None, dtype: torch.dtype | None = None) -> LoadedModel:
    """Load the model in `folder`, or the bundled one; `dtype` None takes the one it was saved in. Nothing is downloaded.

    Raises ConfigError where there is no model, InvalidArgument for one that the paged cache cannot serve.
    """
    cast(Any, logging).disable_progress_bar()
    attention.register()
    place = bundled.bundled_folder() if folder is None else folder
    if not (place / "config.json").is_file():
        raise ConfigError(f"model {place}: no config.json there; give a folder that save_pretrained wrote: nothing is downloaded")
    names = [place / name for name in _TOKENIZER_FILES if (place / name).is_file()]
    try:
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype or "auto", local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True) if names else None
    except Exception as error:  # whatever a library's readers of many formats stumble over is the folder's fault
        why = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON_CHARS]
        raise ConfigError(f"model {place} cannot be loaded ({why}); give a folder that Hugging Face's save_pretrained wrote") from error
    weights = sorted(place.glob("*.safetensors")) or sorted(place.glob("*.bin"))
    identity = Identity(
        model=bundled.NAME if folder is None else place.resolve().name,
        revision=digests.files_digest(weights, {"config.json": digests.config_text(place)}),
        tokenizer=digests.files_digest(names),
        position=position_facts(model.config),
        dtype=str(model.dtype).removeprefix("torch."),
    )
    return prepare(model, identity, tokenizer)


def prepare(model: PreTrainedModel, identity: Identity, tokenizer: PreTrainedTokenizerBase | None = None) -> LoadedModel:
    """Make a model in memory ready to run. Raises InvalidArgument for one that the paged cache cannot serve."""
    attention.register()
    cast(Any, model).eval()
    model.requires_grad_(False)
    loaded = LoadedModel(model, tokenizer, identity, _eos(model))
    why_not = reason_to_refuse(model) or reason_of_trial(model, loaded.geometry())
    if why_not:
        raise InvalidArgument(f"model {identity.model}: {why_not}; serve it without the store")
    return loaded


def _eos(model: PreTrainedModel) -> frozenset[int]:
    """The ids that end a text, by the generation settings where there are any."""
    for source in (model.generation_config, model.config):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return frozenset(cast(list[int], found if isinstance(found, list) else [found]))
    return frozenset()
