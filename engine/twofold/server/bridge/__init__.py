"""Bridge between server and engine: server state, thread crossing, request bodies, metrics."""
