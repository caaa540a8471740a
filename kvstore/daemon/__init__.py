"""The daemon's edges: RPCs, sessions, transfers, metrics, start and stop. What is kept and moved is decided in kvstore.cache.

One event loop owns the cache and everything here except byte work, which runs in threads and comes back to the loop as a completion.
Nothing on the loop blocks.
"""
