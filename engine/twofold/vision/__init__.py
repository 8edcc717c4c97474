"""Pictures: from bytes to the rows that a model reads in place of tokens."""
