"""Calibration: which thresholds keep the promise of `risk`, found on prompts of the user's own."""
