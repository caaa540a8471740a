"""The tier of GPU memory in a real daemon, over a driver for tests; clients are real processes, and map the same memory."""
