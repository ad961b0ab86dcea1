"""Teach a model to draft for itself: gated low-rank updates on masked slots."""
