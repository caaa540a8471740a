"""What a model's tokenizer does for whoever serves texts: text to tokens, a conversation to a prompt, a token to its bytes. Any thread."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from kvstore.errors import InvalidArgument, LimitExceeded
from kvstore.worker.model import LoadedModel

REPLACEMENT = "\ufffd"  # what stands for bytes that are no text, or not yet
_PIECES = 65536  # tokens whose bytes are remembered: a few MB


class Texts:
    """One model's tokenizer, its limits, the tokens that end a text, and the model's name."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.name = loaded.identity.model
        self.max_tokens = loaded.max_tokens
        self.vocabulary = int(loaded.model.config.vocab_size)
        self.ending = loaded.eos
        self._given = loaded.tokenizer
        self._most_letters = 0
        if self._given is not None:
            self._most_letters = self.max_tokens * max(map(len, self._given.get_vocab()), default=1)
            self._given.encode("")  # sets truncation and padding, once: later calls of other threads then change nothing
        self.piece = functools.lru_cache(maxsize=_PIECES)(self._piece)

    def encode(self, text: str, *, endless: bool = False) -> list[int]:
        """Token ids of a text as it stands, with what the model puts before every text. `endless`: it may be longer than the model takes.

        Raises InvalidArgument, and LimitExceeded for a text that is so long that the model cannot take it whatever its tokens are.
        """
        return [int(token) for token in self._tokenizer.encode(self._checked(text, endless))]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, endless: bool = False) -> list[int]:
        """Token ids of a conversation in the model's own template, up to where the next answer begins.

        messages  {"role", "content"} with content a text. Raises InvalidArgument where there is no template, or it refuses them;
        LimitExceeded as `encode`.
        """
        tokenizer = cast(Any, self._tokenizer)
        if not tokenizer.chat_template:
            raise InvalidArgument(f"model {self.name} has no chat template; use /v1/completions")
        try:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise InvalidArgument(f"model {self.name}'s chat template does not take these messages: {error}") from error
        return [int(token) for token in tokenizer.encode(self._checked(text, endless), add_special_tokens=False)]

    def decoder(self, skip_special: bool = True) -> Callable[[Sequence[int]], str]:
        """The function that turns tokens into text, with or without special tokens. Without a tokenizer texts are empty."""
        tokenizer = cast(Any, self._given)
        if tokenizer is None:
            return lambda tokens: ""
        return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))

    def _piece(self, token: int) -> bytes:
        """The bytes of one token, special ones by their name; also of a token that holds a part of a character only."""
        if self._given is None:
            return b""
        tokenizer = cast(Any, self._given)
        text = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        piece = tokenizer.convert_ids_to_tokens(token)
        if REPLACEMENT not in text:
            return (" " + text if piece and piece.startswith("▁") and not text.startswith(" ") else text).encode()
        if piece is None:
            return text.encode()
        if len(piece) == len("<0x00>") and piece.startswith("<0x"):
            return bytes([int(piece[3:5], 16)])
        bytes_of = _byte_letters()
        return bytes(bytes_of[letter] for letter in piece) if all(letter in bytes_of for letter in piece) else text.encode()

    def _checked(self, text: str, endless: bool) -> str:
        """The text, where it can be one in UTF-8, and is worth the seconds that a tokenizer takes for a megabyte."""
        if len(text) > self._most_letters > 0 and not endless:
            raise LimitExceeded(f"the text has {len(text)} letters, the model takes {self.max_tokens} tokens; shorten it")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"the text has half of a surrogate pair at {error.start}; send whole characters") from error
        return text

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self._given is None:
            raise InvalidArgument(f"model {self.name} has no tokenizer in its folder; give token ids to /v1/completions")
        return self._given


@functools.cache
def _byte_letters() -> dict[str, int]:
    """Which byte a letter stands for in the vocabularies of byte-level BPE.

    A printable byte of Latin-1 stands for itself; the others, in their order, are the letters from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
