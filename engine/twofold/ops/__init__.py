"""The CPU operations a model is made of: Python's names for the native code.

Activations are C-contiguous float32 arrays that are read, and written in place, without a copy. Weights are float32, or
uint16 holding bfloat16 bits, and are kept by reference: whoever makes an operation must not change them afterwards.
Every call checks shape, element type and layout, raises KernelError naming the argument that does not fit, and releases
the GIL. Results of one row never depend on the other rows of the batch or on the number of threads.

Operations that share a `ThreadTeam` take turns. This is not a tensor library: only what a decoder needs is here.
"""

from twofold._core import (
    AttentionBatch,
    AttentionBlock,
    DenseFfn,
    KvCache,
    LmHead,
    Router,
    ThreadTeam,
    cpu_features,
    dequantise_rows,
    embed,
    isa_choice,
    quantise_rows,
)

__all__ = [
    "AttentionBatch",
    "AttentionBlock",
    "DenseFfn",
    "KvCache",
    "LmHead",
    "Router",
    "ThreadTeam",
    "cpu_features",
    "dequantise_rows",
    "embed",
    "isa_choice",
    "quantise_rows",
]
