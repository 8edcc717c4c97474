"""Resources of each compiled CUDA kernel: `make check-cuda` compares it with the kept table."""
