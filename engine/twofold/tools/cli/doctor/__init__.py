"""`twofold doctor`: checks this machine and which models fit it."""
