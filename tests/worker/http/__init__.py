"""The HTTP interface before the engine."""
