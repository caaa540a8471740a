"""Tests of the tiers against real files."""
