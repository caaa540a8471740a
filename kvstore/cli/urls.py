"""An HTTP server's address as a person writes it. No command of its own."""

from urllib.parse import SplitResult, urlsplit

from kvstore.errors import InvalidArgument


def server_url(text: str, schemes: tuple[str, ...] = ("http",)) -> SplitResult:
    """The parts of the URL `text`; without a scheme it is http. Raises InvalidArgument for one that no request could be sent to."""
    try:
        parts = urlsplit(text if "//" in text else f"http://{text}")
        wrong = _wrong(parts, schemes)
    except ValueError as error:  # a port that is no number, an address in brackets that does not end, a name that none can have
        wrong = str(error)
    if wrong:
        raise InvalidArgument(f"{text!r} is no address of a server: {wrong}; write {schemes[0]}://127.0.0.1:8000")
    return parts


def _wrong(parts: SplitResult, schemes: tuple[str, ...]) -> str:
    if parts.scheme not in schemes:
        return f"{parts.scheme} is not {' or '.join(schemes)}"
    if not parts.hostname or "@" in parts.netloc:
        return "it needs a host, and no user"
    if not parts.geturl().isascii() or not parts.geturl().isprintable() or " " in parts.geturl():
        return "it has a space, or a character that is not ASCII"
    parts.hostname.encode("idna")
    return "port 0 is none" if parts.port == 0 else ""
