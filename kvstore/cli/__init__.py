"""The `kvstore` command: one module per sub-command, found through the list in main.py. Nothing imports these."""
