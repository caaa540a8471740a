"""The real daemon and real clients on a simulated machine: clock, disk, shared memory, network and processes, all from one seed.

    python -m tests.simulation SEED --verbose      replays one run, step by step

What is real: the daemon from its start to its orderly stop (cache core, hub, sessions, service, mover, copier, nvme tier, records),
and the asyncio client. What is simulated: the system calls of the disk, the arena and its session files, grpc's transport, threads.
`patches.py` is the list of what is put in the place of what.
"""
