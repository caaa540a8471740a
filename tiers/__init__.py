"""Where blocks live, one class a file: slots of bytes behind one small protocol."""

if __name__ == "tiers":
    raise ImportError("there is no top-level package 'tiers' to import: write 'import kvstore.tiers' (this folder is its real place)")
