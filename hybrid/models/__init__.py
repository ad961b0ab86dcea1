"""Model families, weights and backbones."""
