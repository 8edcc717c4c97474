"""Tensor sources: safetensors and GGUF files, weight formats, and read-ahead for packing."""
