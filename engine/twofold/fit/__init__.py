"""Automatic fit: chooses context, KV cache, expert slots and threads for a machine, and predicts the speed."""
