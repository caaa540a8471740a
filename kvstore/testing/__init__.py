"""Suites that an implementation of one of the store's seams subclasses to be tested, and a real daemon process.

The suites need pytest; `daemon` does not, and benchmarks use it too. Nothing else imports this package.
"""
