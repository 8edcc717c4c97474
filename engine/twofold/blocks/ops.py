"""CPU operations of a model: Python names of the native code.

Activations are C-contiguous float32 arrays that are read, and written in place, without a copy. Weight matrices are
packed once for the kernels (`PackedMatrix`, from the rows of a file); vectors and a router's gate (float32, or uint16
holding bfloat16 bits) are kept by reference: the caller must not change them after creating an operation. Every call
checks shape, element type and layout, raises KernelError naming the argument that does not fit, and releases the GIL.
Results of one row never depend on the other rows of the batch or on the number of threads.

Operations that share a `ThreadPool` run one at a time. This is not a tensor library: it has only what a decoder needs.
"""

import numpy as np
import numpy.typing as npt

from twofold._core import (
    AdapterRows,
    AttentionBatch,
    Block,
    Chooser,
    Decoder,
    DenseFfn,
    Embedding,
    GatedDelta,
    GatedNorm,
    Gqa,
    HyperConnection,
    Indexer,
    LayerInput,
    LayerInputs,
    LmHead,
    LowRank,
    Mla,
    MtpInput,
    NgramInput,
    PackedMatrix,
    PostNorm,
    RoutedExperts,
    Router,
    RouterShape,
    RowTable,
    ScoreRule,
    SharedExperts,
    ShortConvolution,
    StateCache,
    StreamHead,
    Stretch,
    ThreadPool,
    TokenRules,
    cpu_features,
    embed,
    expect_finite,
    isa_choice,
    left_out_levels,
    log_probabilities,
    mask_logits,
    measure_ceilings,
    pick_tokens,
    products_of,
    quantise_rows,
    runnable_levels,
    work_of_parts,
    work_times,
)
from twofold.weights.weight_format import WeightMatrix

__all__ = [
    "AdapterRows",
    "AttentionBatch",
    "Block",
    "Chooser",
    "Decoder",
    "DenseFfn",
    "Embedding",
    "GatedDelta",
    "GatedNorm",
    "Gqa",
    "HyperConnection",
    "Indexer",
    "LayerInput",
    "LayerInputs",
    "LmHead",
    "LowRank",
    "Mla",
    "MtpInput",
    "NgramInput",
    "PackedMatrix",
    "PostNorm",
    "RoutedExperts",
    "Router",
    "RouterShape",
    "RowTable",
    "ScoreRule",
    "SharedExperts",
    "ShortConvolution",
    "StateCache",
    "StreamHead",
    "Stretch",
    "ThreadPool",
    "TokenRules",
    "cpu_features",
    "dequantise",
    "embed",
    "expect_finite",
    "isa_choice",
    "left_out_levels",
    "log_probabilities",
    "mask_logits",
    "measure_ceilings",
    "pick_tokens",
    "products_of",
    "quantise_rows",
    "runnable_levels",
    "work_of_parts",
    "work_times",
]


def dequantise(pool: ThreadPool, matrix: WeightMatrix) -> npt.NDArray[np.float32]:
    """The whole matrix as exact float32, for the few matrices used that way and for comparisons."""
    out = np.empty(matrix.shape, np.float32)
    embed(pool, matrix, np.arange(matrix.rows, dtype=np.int32), out)
    return out
