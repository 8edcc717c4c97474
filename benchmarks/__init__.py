"""Measurements of the whole product, run by hand: `python -m benchmarks` lists them."""
