"""Memory of devices: what a model needs, how it is split, and which device has which dense layers."""
