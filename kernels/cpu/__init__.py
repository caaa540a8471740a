"""Attention on the CPU, over K and V where they lie in the arena: a C library, and its launcher for workers.

    kernel = CpuAttention(geometry, q_heads=9, threads=2)          # once for a model
    writing = kernel.writing(slots, places)                        # once a step: where the new tokens go
    reading = kernel.reading(tables, lengths)                      # once a step: which slots each row attends to
    writing.write(layer, keys, values)                             # each layer: addresses of the new K and V
    reading.decode(layer, q, out, scale=scale)                     # each layer: addresses of the queries and of the results
    prompt = kernel.prompt(table, start, count)                    # likewise for several new tokens of one sequence; prompt.attend(…)

Nothing here imports torch: memory is given by address. `available` says whether, and why not, the library can be used: it is compiled
at install where a C compiler is at hand, and KVSTORE_NATIVE=off leaves it unused. The calls let go of the interpreter's lock.
"""

from kvstore.kernels.cpu.launch import CpuAttention, Prompt, Reading, Strides, Writing, slot_addresses
from kvstore.kernels.cpu.library import available, instruction_sets

__all__ = ["CpuAttention", "Prompt", "Reading", "Strides", "Writing", "available", "instruction_sets", "slot_addresses"]
