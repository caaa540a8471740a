"""A store for the keys and values that language-model servers would otherwise compute again.

ARCHITECTURE.md is the map: the words, the rules, and which file to open for which change.
"""

__version__ = "0.1.0"
