"""Tests of the worker: the real model where bits matter, a tiny random one in fp32 where many runs do."""
