"""What the compiler made of each CUDA kernel: `make check-cuda` compares it with the kept table."""
