"""Arguments of native blocks."""

CpuPart = dict[str, object]
"""Arguments of one part of a native block (engine/bindings/blocks/attention_parts.h)."""
