"""Routers: which mode, how many tokens."""
