"""How words of others are printed in a terminal. No command of its own."""


def shown(text: str) -> str:
    """`text` with everything that does not print as an escape: a client's name must not move the cursor, nor begin a line of its own."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
