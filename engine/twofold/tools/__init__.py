"""Programs on top of the engine: the command line, the lab, the load generator."""
