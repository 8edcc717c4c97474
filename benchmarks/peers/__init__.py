"""Comparisons with other engines: random models of real shapes, and each engine in its own process."""
