"""The shared KV cache."""
