"""Benchmarks and the replayer, one module each, with its parts in modules of its name: what `kvstore bench NAME` runs.

Each is a process of its own; nothing here is imported by the daemon.
"""
