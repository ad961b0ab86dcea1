"""Train a DFlash drafter: a small network over the features of a frozen target."""
