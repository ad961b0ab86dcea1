"""Drafters and adapters as other engines load them, and the commands that serve them."""
