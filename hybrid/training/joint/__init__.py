"""Fine-tune a model on autoregression and block diffusion at once: `[noisy | clean]`."""
