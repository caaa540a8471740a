"""The wire format, and the code generated from it."""

if __name__ == "proto":
    raise ImportError("there is no top-level package 'proto' to import: write 'import kvstore.proto' (this folder is its real place)")
