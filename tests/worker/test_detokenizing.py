"""Text from tokens that come one at a time: whole characters, and stop strings that never show."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgument
from kvstore.worker.detokenizing import _SPLIT_TOKENS, Detokenizer, Stops
from kvstore.worker.model import LoadedModel
from kvstore.worker.texts import Texts
from tests.worker.unhurried import unhurried

TEXT = "Grüße, 你好 and 🎉🎊! — naïve «ﬁn» \n\t 日本語テキスト 👨‍👩‍👧‍👦 end"


def bytes_as_text(tokens: object) -> str:
    """A decoder whose tokens are bytes."""
    return bytes(tokens).decode(errors="replace")  # type: ignore[call-overload, no-any-return]


@unhurried
@given(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=80), st.integers(0, 10))
@example(TEXT, 3)
@example("00𐀀𐀀", 9)
def test_no_character_comes_out_broken(text: str, context: int) -> None:
    """Wherever the prompt ends, also in the middle of a character."""
    encoded = text.encode()
    detokenizer = Detokenizer(bytes_as_text, encoded[:context])
    pieces = [detokenizer.add(token) for token in encoded[context:]]
    assert not any("\ufffd" in piece for piece in pieces)
    before = bytes_as_text(encoded[:context]).rstrip("\ufffd")
    assert before + "".join(pieces) + detokenizer.end() == text


@unhurried
@given(st.lists(st.sampled_from(["a", "é", "你", "🎉", "\ufffd"]).map(str.encode) | st.binary(max_size=12), max_size=60))
@example([b"\xff" * 10, "你".encode(), b"\xff" * 200, "🎉".encode()])
def test_bytes_that_are_no_text_are_not_lost(parts: list[bytes]) -> None:
    tokens = list(b"".join(parts))
    detokenizer = Detokenizer(bytes_as_text)
    pieces = [detokenizer.add(token) for token in tokens]
    together = "".join(pieces) + detokenizer.end()
    readable = [letter for letter in bytes_as_text(tokens) if letter != "\ufffd"]
    assert [letter for letter in together if letter != "\ufffd"] == readable
    assert ("\ufffd" in together) == ("\ufffd" in bytes_as_text(tokens))


def test_what_can_be_no_character_is_not_held_for_ever() -> None:
    detokenizer = Detokenizer(bytes_as_text)
    assert any(detokenizer.add(0xFF) for _ in range(_SPLIT_TOKENS))


@unhurried
@given(st.text(alphabet=TEXT, max_size=60))
@example(TEXT * 3)
def test_a_real_tokenizer_s_text_comes_back(smol_texts: Texts, text: str) -> None:
    tokens = smol_texts.encode("prompt: " + text)
    prompt = len(smol_texts.encode("prompt:"))
    detokenizer = Detokenizer(smol_texts.decoder(), tokens[:prompt])
    pieces = [detokenizer.add(token) for token in tokens[prompt:]]
    assert not any("\ufffd" in piece for piece in pieces)
    before = smol_texts.decoder()(tokens[:prompt]).rstrip("\ufffd")
    assert before + "".join(pieces) + detokenizer.end() == "prompt: " + text


def test_the_bytes_of_tokens_are_those_of_the_text(smol_texts: Texts) -> None:
    tokens = smol_texts.encode(TEXT)
    assert b"".join(smol_texts.piece(token) for token in tokens) == TEXT.encode()


def test_special_tokens_show_where_they_are_asked_for(smol_texts: Texts) -> None:
    tokens = smol_texts.encode("one<|im_end|>two")
    shown = {skip: Detokenizer(smol_texts.decoder(skip_special=skip)) for skip in (True, False)}
    texts = {skip: "".join(map(each.add, tokens)) + each.end() for skip, each in shown.items()}
    assert texts == {True: "onetwo", False: "one<|im_end|>two"}


strings = st.text(alphabet="ab", min_size=1, max_size=4)


@unhurried
@given(st.lists(st.text(alphabet="abc", max_size=5), max_size=12), st.lists(strings, min_size=1, max_size=4))
@example(["ab", "c"], ["abc", "b"])
@example(["aa", "ab"], ["aab"])
def test_a_stop_string_never_shows_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    # One letter at a time, the plainest way: the first letter with which a string is complete ends the text.
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    longest = max((len(stop) for stop in stops if ends and text[: ends[0]].endswith(stop)), default=0)
    expected = text[: ends[0] - longest] if ends else text
    cut = Stops(stops)
    out = [cut.add(piece) for piece in pieces]
    assert "".join(out) + cut.end() == expected
    assert cut.found == bool(ends)


@unhurried
@given(st.lists(st.text(alphabet="abc", max_size=5), max_size=12), strings)
def test_only_what_may_be_a_stop_string_is_held(pieces: list[str], stop: str) -> None:
    cut, seen, out = Stops([stop]), "", ""
    for piece in pieces:
        seen += piece
        out += cut.add(piece)
        if cut.found:
            return
        held = seen[len(out) :]
        assert seen.startswith(out)
        assert stop.startswith(held)


def test_half_a_surrogate_pair_is_refused(smol_texts: Texts) -> None:
    with pytest.raises(InvalidArgument, match="surrogate"):
        smol_texts.encode("a\ud800")


def test_a_conversation_becomes_the_model_s_own_prompt(smol_texts: Texts) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = smol_texts.decoder(skip_special=False)(smol_texts.encode_chat(messages))
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_model_without_a_tokenizer_takes_no_text(tiny: LoadedModel) -> None:
    texts = Texts(tiny)
    with pytest.raises(InvalidArgument, match="no tokenizer"):
        texts.encode("hello")
    with pytest.raises(InvalidArgument, match="no tokenizer"):
        texts.encode_chat([])
    assert (texts.decoder()([1, 2]), texts.piece(3)) == ("", b"")


@pytest.fixture(scope="module")
def smol_texts(smol: LoadedModel) -> Texts:
    """The bundled model's tokenizer."""
    return Texts(smol)
