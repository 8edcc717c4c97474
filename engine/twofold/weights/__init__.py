"""Where tensors come from: safetensors and GGUF files, their formats, and reading ahead of who packs them."""
