"""The tests, by the names of what they test."""
