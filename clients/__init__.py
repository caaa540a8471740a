"""The client side of the session protocol, and one module per engine."""

if __name__ == "clients":
    raise ImportError("there is no top-level package 'clients' to import: write 'import kvstore.clients' (this folder is its real place)")
