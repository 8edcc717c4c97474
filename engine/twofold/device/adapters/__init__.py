"""LoRA adapters on a device: factors in its memory, and the products of adapted steps."""
