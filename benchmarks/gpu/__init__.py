"""Measurements of a GPU, and the device and the models that tests/gpu checks on. `make gpu-day` runs them."""
