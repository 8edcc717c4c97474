"""`twofold serve`: one process, or replicas on Ray Serve."""
