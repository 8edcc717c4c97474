"""Rules for modules of a model: where their experts may be, in which format, on how many threads "
"(docs/placement-rules.md)."""
