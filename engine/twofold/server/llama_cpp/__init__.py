"""llama.cpp's API, as far as editors use it."""
