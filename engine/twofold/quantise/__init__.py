"""Quantisation of a model to a new directory, and measurement of its quality loss."""
