"""Where experts live and run: machine profiles, the choice of accelerator, the packed store and the MoE backend."""
