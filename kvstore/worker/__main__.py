"""`python -m kvstore.worker`: a worker process behind a pipe; see loop.py."""

from kvstore.worker.loop import main

main()
