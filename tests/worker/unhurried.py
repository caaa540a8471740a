"""Hypothesis without clocks: on a busy machine one example may take seconds, which says nothing about the code."""

from hypothesis import HealthCheck, settings

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
