"""Words of others: how they are printed in a terminal, and whether they are text at all. No command of its own."""

from kvstore.errors import InvalidArgument


def shown(text: str) -> str:
    """`text` with everything that does not print as an escape: a client's name must not move the cursor, nor begin a line of its own."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def utf8(text: str, what: str) -> str:
    """`text` as it is. Raises InvalidArgument where `what` held bytes that are no UTF-8, which Python keeps as half surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{what} is no text in UTF-8 (character {error.start}); give text in UTF-8") from error
    return text
