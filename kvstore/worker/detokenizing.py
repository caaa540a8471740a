"""Tokens to text as they come: never half a character, and never a part of a stop string. No I/O, no clock."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what decoders put for bytes that are no text, or not yet
CONTEXT_TOKENS = 6  # tokens before a new one that its text may depend on: a space at the start of a text is often left out
WINDOW_TOKENS = 24  # tokens decoded at once before the older ones are let go: decoding them takes some microseconds
_MOST_WINDOW_TOKENS = 96  # tokens: past it the older ones go even in the middle of bytes that are no text
_MOST_BYTES = 4  # bytes of a character: it begins at most so many tokens before its last
_SPLIT_TOKENS = 8  # tokens a character may be spread over; what is not whole by then is no character


class Detokenizer:
    """The text of one sequence that grows. What `add` and `end` return, put together, is its text after the context.

    decode   turns token ids into text
    context  the tokens before the first: some of them decide whether its text begins with a space
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = self._context(context)
        self._shown = self._whole(self._decode(self._window))  # the text of the window that is out
        self._waiting_tokens = 0

    def add(self, token: int) -> str:
        """The text that is certain with this token; "" while a character is not whole."""
        self._window.append(token)
        text = self._decode(self._window)
        whole = self._whole(text)
        self._waiting_tokens = self._waiting_tokens + 1 if len(whole) < len(text) else 0
        if self._waiting_tokens >= _SPLIT_TOKENS:
            whole = text[:-1]  # all but the last are broken for good; that one may be a character's beginning
        out = whole[len(self._shown) :]
        self._shown = max(self._shown, whole, key=len)
        if len(self._window) >= WINDOW_TOKENS:
            self._slide(len(text) - len(self._shown))
        return out

    def end(self) -> str:
        """What was held back: bytes that never became a character."""
        text = self._decode(self._window)
        out, self._shown = text[len(self._shown) :], text
        return out

    def _slide(self, held: int) -> None:
        """Let go of older tokens, where the newer ones alone give the same text, of which so many letters are held back."""
        kept = self._window[-CONTEXT_TOKENS:]
        text = self._decode(kept)
        if REPLACEMENT not in text or (held <= 1 and len(self._window) >= _MOST_WINDOW_TOKENS):
            self._window, self._shown = kept, text[: len(text) - held]

    def _context(self, tokens: Sequence[int]) -> list[int]:
        """The last tokens before the first, from where a character begins: its later bytes alone would be no text."""
        begin = max(len(tokens) - CONTEXT_TOKENS, 0)
        places = range(begin, max(begin - _MOST_BYTES, -1), -1)
        whole = (at for at in places if not self._decode(tokens[at:]).startswith(REPLACEMENT))
        return list(tokens[next(whole, begin) :])

    @staticmethod
    def _whole(text: str) -> str:
        return text.rstrip(REPLACEMENT)


class Stops:
    """Cuts a text that comes in pieces before the first stop string that is complete in it.

    Of strings that are complete with the same character the one that began first counts. How the text was cut into pieces changes nothing.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in strings if string]
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """The text that may go out now. Once `found` is true there is no more."""
        if self.found or not self._strings:
            return "" if self.found else piece
        text = self._held + piece
        hits = [(at + len(string), at) for string in self._strings if (at := text.find(string)) >= 0]
        if hits:
            self.found, self._held = True, ""
            return text[: min(hits)[1]]
        held = max(self._begun(text, string) for string in self._strings)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """What was held back, where the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _begun(text: str, string: str) -> int:
        """How many letters at the end of the text are the beginning of the string."""
        most = min(len(string) - 1, len(text))
        return next((count for count in range(most, 0, -1) if text.endswith(string[:count])), 0)
