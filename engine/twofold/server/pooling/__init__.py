"""Embeddings and reranking: vectors of inputs instead of answers."""
