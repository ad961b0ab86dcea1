"""Benchmarks against transformers."""
