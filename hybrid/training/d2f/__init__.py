"""Distil a bidirectional masked-diffusion model into a block-causal one (arXiv:2508.09192)."""
