"""Writing a model again with quantised weights, and measuring what that cost in quality."""
