"""The worker on a GPU: its paged cache is a pool of GPU memory, and the CUDA kernels attend over it in place.

Not yet run on a GPU: the tests put a device in its place whose memory is the host's, whose kernels are the host shim, and which checks
the rules (`tests/worker/gpu`). The engine's thread computes; promotions end in a thread of their own. Nothing imports CuPy or asks
torch for a GPU before `cuda.py` is used.

    device.py    what is asked of a GPU                            cuda.py      a real one
    kernels.py   a step's writes and decodes, over block tables    graphs.py    decode steps recorded once and replayed
    running.py   one pass of the model: from a graph, or not       store.py     a pool, with dram below it: hits there are brought up
    opening.py   which device, and which store for it
"""
