"""Training of diffusion adapters."""
