"""What callers of the engine name: settings (`config`), requests and results (`types`), errors."""
