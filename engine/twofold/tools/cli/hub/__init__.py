"""`twofold pull`, `list` and `rm`: models of a hub."""
