"""One file per model family: parse its configuration, compose its blocks."""
