"""Random models of the shapes of public ones, written as GGUF files."""
