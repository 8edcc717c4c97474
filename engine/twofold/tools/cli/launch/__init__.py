"""`twofold launch`: run a coding agent on a model."""
