"""The CUDA kernels, run on a CPU by the host shim, compiled for GPUs, and shown to be watched by their tests."""
