"""Real crashes: a daemon and client processes under load, killed at random moments, on the same directory again and again.

`python -m tests.crash --kills 300` runs a long one. `storm` drives, `load` is what each client process does, `promises` is what the daemon
has said to be on disk and must therefore find again.
"""
