"""Measurements, run from a checkout; no part of the package that is installed."""
