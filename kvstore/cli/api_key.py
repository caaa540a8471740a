"""The key that a worker asks of its clients and that `kvstore chat` sends, out of the environment. No command of its own."""

import os

from kvstore.config import API_KEY
from kvstore.errors import ConfigError


def api_key() -> str:
    """KVSTORE_API_KEY without white space around it, as a secret's file ends with a line's end; "" where it is not set.

    Raises ConfigError for a key that no header of HTTP can carry, which no client could ever send, and for one of white space alone.
    """
    given = os.environ.get(API_KEY, "")
    key = given.strip()
    if given and not key:
        raise ConfigError(f"{API_KEY} is nothing but white space; set a key, or unset it where everybody may ask")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{API_KEY} has characters that no HTTP header can carry; use printable ASCII alone")
    return key
