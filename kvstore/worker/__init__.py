"""The engine that ships with the store: a Hugging Face model whose paged KV cache is the store's arena.

It owns the model, the block tables of its running sequences, and what they hold of the store. One thread calls it; behind that
thread only the reserving of further slots runs in a thread of the cache's own. What may block: loading a model, and a prompt's
acquire, which waits for blocks on their way up under a deadline. A decode step waits for the store only where no slot is left.

    model.py       loads a model, says its identity and geometry                 rows.py        a block's bytes as rows of tensors
    bundled.py     finds the model that a package carries, and converts it       digests.py     names files by what is in them
    paged.py       block tables; acquire, reserve, commit, release               attention.py   attention over a block table
    engine.py      prefill and decode of a small batch, with its timings         standalone.py  a store in this process alone
    plain.py       the same without any store, to compare with                   opening.py     the store of the daemon, or of this process
    loop.py        a worker process behind a pipe (python -m kvstore.worker)
"""

import os

# Read by huggingface_hub when it is first imported: nothing here may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# Read by GNU OpenMP when torch is first imported. A worker shares its cores with the daemon and with others: at the default its
# threads spin for milliseconds at every barrier, and where one core is taken a step lasts up to ten times as long.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
