"""What is told of an answer, event by event."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InternalFault, Unavailable
from kvstore.worker.answering import Answer, Delta, Reason, Wanted
from kvstore.worker.requests import Choice, Ended, Finish, Made, Started
from kvstore.worker.texts import Texts
from tests.worker.unhurried import unhurried


def answer(texts: Texts, prompt: str = "Say:", branches: int = 1, wanted: Wanted | None = None) -> Answer:
    """Of a prompt."""
    return Answer(texts, texts.encode(prompt), branches, wanted or Wanted())


def tell(answered: Answer, texts: Texts, text: str, branch: int = 0) -> list[Delta]:
    """All tokens of a text."""
    deltas = [answered.take(Made(branch, Choice(token, -1.0))) for token in texts.encode(text)]
    return [delta for delta in deltas if delta is not None]


@unhurried
@given(st.text(alphabet="ab STOP你🎉\n", max_size=30), st.sampled_from([Finish.EOS, Finish.LENGTH]))
def test_text_and_told_tokens_fit_together(smol_texts: Texts, text: str, finish: Finish) -> None:
    answered = answer(smol_texts, wanted=Wanted(stop=["STOP", "\n\n"], logprobs=True))
    deltas = tell(answered, smol_texts, text)
    last = answered.take(Ended(0, finish))
    deltas += [last] if last else []
    cut = min((at for at in (text.find("STOP"), text.find("\n\n")) if at >= 0), default=-1)
    out = "".join(delta.text for delta in deltas)
    assert out == (text if cut < 0 else text[:cut])
    assert [delta.reason for delta in deltas if delta.reason] == [Reason.LENGTH if cut < 0 and finish is Finish.LENGTH else Reason.STOP]
    assert deltas[-1].reason
    assert answered.done
    told = [each for delta in deltas for each in delta.tokens]
    spelled = b"".join(smol_texts.piece(each.choice.token) for each in told)
    # All of the text; a token may reach over into the stop string, and one may begin in the middle of a character.
    assert spelled.startswith(out.encode())
    assert cut >= 0 or spelled == out.encode()
    for each, following in itertools.pairwise(told):
        assert each.offset <= following.offset <= len(out)


def test_nothing_is_told_after_a_stop(smol_texts: Texts) -> None:
    answered = answer(smol_texts, branches=2, wanted=Wanted(stop=["b"]))
    (delta,) = tell(answered, smol_texts, "b")
    assert (delta.text, delta.reason, delta.cancel) == ("", "stop", True)
    assert tell(answered, smol_texts, "more") == []
    assert answered.take(Ended(0, Finish.CANCELLED)) is None
    assert answered.error is None
    assert [answered.done, answered.made_tokens] == [False, 1]
    tell(answered, smol_texts, "a", branch=1)
    assert answered.take(Ended(1, Finish.EOS)) == Delta(1, "", (), "stop")
    assert [answered.done, answered.made_tokens] == [True, 2]


def test_a_stop_with_the_last_token_needs_no_cancelling(smol_texts: Texts) -> None:
    """The end brings out half a character, and with it a stop string."""
    answered = answer(smol_texts, wanted=Wanted(stop=["\ufffd"]))
    (token, *_) = smol_texts.encode("你")[-2:]
    assert answered.take(Made(0, Choice(token))) is None
    assert answered.take(Ended(0, Finish.LENGTH)) == Delta(0, "", (), "stop", cancel=False)


def test_ends_that_nobody_asked_for_are_faults(smol_texts: Texts) -> None:
    fault = InternalFault("broke")
    for ended, kind in (
        (Ended(0, Finish.FAILED, fault), InternalFault),
        (Ended(0, Finish.FAILED), InternalFault),
        (Ended(0, Finish.CANCELLED), Unavailable),
    ):
        answered = answer(smol_texts)
        answered.take(Started(16, 0.5))
        tell(answered, smol_texts, "half")
        assert answered.take(ended) is None
        assert isinstance(answered.error, kind)
        assert tell(answered, smol_texts, "more") == []
        assert (answered.hit_tokens, answered.queued_s, answered.done) == (16, 0.5, False)


@pytest.mark.parametrize(("prompt", "first"), [("Hello", " world"), ("Grüße 你", "好")])
def test_an_answer_goes_on_where_its_prompt_ends(smol_texts: Texts, prompt: str, first: str) -> None:
    tokens = smol_texts.encode(prompt + first)
    cut = len(smol_texts.encode(prompt))
    answered = Answer(smol_texts, tokens[:cut], 1, Wanted())
    deltas = [answered.take(Made(0, Choice(token))) for token in tokens[cut:]]
    assert "".join(delta.text for delta in deltas if delta) == first
