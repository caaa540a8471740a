"""Attention, gather and scatter over slots; CUDA sources, the CPU kernels and their launchers."""

if __name__ == "kernels":
    raise ImportError("there is no top-level package 'kernels' to import: write 'import kvstore.kernels' (this folder is its real place)")
