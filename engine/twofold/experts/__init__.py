"""Expert placement and execution: machine profiles, accelerator choice, the packed store and the MoE backend."""
