"""Observability of requests: counters and histograms, and spans of traces."""
