"""Denoising policies: unmask rules, block schedules, cache policies, and the presets they make."""
