"""Training beside frozen, packed weights: forward and backward of routed experts for PyTorch."""
