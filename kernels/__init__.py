"""Attention, gather and scatter over slots; CUDA sources, the CPU kernels and their launchers."""

if __name__ == "kernels":
    # transformers imports whatever is called `kernels` to learn its version, and fails with it: so here, unlike in the
    # neighbouring folders, the import itself succeeds, and every use of it raises.
    __path__ = []

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError("there is no top-level package 'kernels' to use: write 'import kvstore.kernels' (this folder is its real place)")
