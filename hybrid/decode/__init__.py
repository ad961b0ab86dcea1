"""The decode step and its loop."""
