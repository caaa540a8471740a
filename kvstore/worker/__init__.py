"""The engine that ships with the store: a Hugging Face model whose paged KV cache is the store's arena.

It owns the model, the block tables of its running sequences, and what they hold of the store. One thread calls an engine; behind that
thread slots are reserved ahead (pool.py) and the blocks of waiting prompts are leased (pulls.py). What may block: loading a model, and
a step that has nothing to compute but waits for a pull, under a deadline. A decode waits for the store only where no slot is left.

    requests.py    the words between an engine and whoever serves it
    serving.py     an engine in a thread of its own                  engine.py      a step: admit, share out, find slots, compute, tell
    scheduler.py   who goes first, who gives way: rules, no I/O      admission.py   those that wait, and their pulls
    lives.py       branches begin, fork, are stopped, end            branch.py      one request, its branches     beams.py  beam search
    costs.py       what computing and loading take here              sampling.py    the next token
    paged.py       block tables that share, commit and copy          pool.py, pulls.py   slots ahead; leases of prefixes
    streams.py, streaming.py, rotation.py   texts without an end      sequences.py    what a step knows of either kind
    forward.py     one pass of the model                             attention.py   attention over block tables   rows.py  a block as rows
    spans.py       a sequence's part in a step                       native.py       the CPU kernels under a step
    kinds.py, latent.py, scores.py   attention kinds: windows, MLA, sinks and caps
    model.py       loads a model, says its identity and geometry     bundled.py     the model that a package carries, converted
    standalone.py  a store in this process alone                     opening.py     the daemon's store, or one's own
    plain.py       the same without any store, to compare with       loop.py        a worker behind a pipe (python -m kvstore.worker)
    http/          OpenAI's HTTP interface                           answering.py, texts.py, detokenizing.py   tokens become text
"""

import os

# Read by huggingface_hub when it is first imported: nothing here may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# Read by GNU OpenMP when torch is first imported. A worker shares its cores with the daemon and with others: at the default its
# threads spin for milliseconds at every barrier, and where one core is taken a step lasts up to ten times as long.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
