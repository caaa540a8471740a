"""What went wrong for users of systems like this one, each case against a real daemon: real processes, sockets and files."""
