"""Placement rules for modules of a model: device, format and number of threads (docs/guides/placement-rules.md)."""
