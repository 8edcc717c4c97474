"""Measurements of the whole product, run by hand: `python -m benchmarks.serving`, `python -m benchmarks.soak`."""
