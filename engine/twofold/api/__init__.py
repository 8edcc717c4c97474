"""The engine's public types: settings (`config`), requests and results (`types`), errors."""
