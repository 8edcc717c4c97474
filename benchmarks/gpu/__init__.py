"""A GPU measured by subject (`python -m benchmarks.gpu`), and the device and the models that tests/gpu checks on."""
