"""`twofold rules`: explain placement rules."""
