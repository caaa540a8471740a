"""The cache core: decides what is where and who may touch it. It does no I/O and reads no clock.

Owner: one event loop; no other thread may call in, and nothing here blocks. Inputs and decisions are in `messages`; `core.Cache` is the
façade.
"""
