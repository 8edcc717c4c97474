"""`twofold chat`: talk with a model in the terminal."""
