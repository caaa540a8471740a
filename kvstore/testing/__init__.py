"""Suites that an implementation of one of the store's seams subclasses to be tested. Needs pytest; nothing else imports it."""
