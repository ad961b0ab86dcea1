"""Distil a masked-diffusion model's own decoding order into fewer forwards (arXiv:2601.07568)."""
