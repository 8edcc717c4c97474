"""Parts of attention, in the order of a layer: project, norm, rotate, scale, store, select, attend, gate, out.

A part is a small frozen dataclass: its tensors, its state and cost where it has any, and its operators for the CPU and
for a device. A block (`blocks.gqa`, `blocks.mla`, `blocks.gated_delta`) is composed of parts; a family says which.
"""
