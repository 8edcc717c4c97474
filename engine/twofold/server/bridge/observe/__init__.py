"""What is seen of requests: counters and histograms, and spans of traces."""
