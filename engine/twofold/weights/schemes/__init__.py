"""Quantisation schemes of Hugging Face checkpoints: their config.json names, and conversion of their tensors.

A scheme's matrix is several stored tensors (packed integers, scales, zero points). `Scheme.matrices` locates them in
the files' headers. Each matrix becomes one tensor in a kernel format, with the same values: groups of a symmetric 4-bit
scheme are blocks of q4_0, integers of up to 8 bits blocks of int8 or q8_0.
"""
