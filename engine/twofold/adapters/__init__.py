"""LoRA adapters: files of every published layout, read into one form."""
