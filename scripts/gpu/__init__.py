"""Checks and measurements that need a GPU, by subject. `gpu_test.py` and `gpu_bench.py` run them."""
