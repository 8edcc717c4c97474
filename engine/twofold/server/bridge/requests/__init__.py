"""One request: its frame and body, and the connection that its answer goes to."""
