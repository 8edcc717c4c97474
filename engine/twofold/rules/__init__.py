"""Placement rules for modules of a model: device, format and number of threads (docs/placement-rules.md)."""
