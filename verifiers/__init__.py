"""What accepts tokens."""
