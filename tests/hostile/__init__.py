"""Hostile and broken input: whatever a client sends, the daemon answers with a typed error, lives, and serves everybody else.

`python -m tests.hostile --messages 1000000` runs a long one. `words` makes values and messages, `attack` sends them, `bystander` is the
client that must notice nothing, `siege` puts them together.
"""
