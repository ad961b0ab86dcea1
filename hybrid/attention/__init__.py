"""Attention patterns: one description for every mask."""
