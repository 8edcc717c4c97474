"""The engine on a device: dense layers, graphs, sampling, the routed experts of a step, transfers and memory."""
