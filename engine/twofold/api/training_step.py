"""One optimiser step of a fine-tuning run, for progress and telemetry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TrainingStep:
    """Figures of one optimiser step."""

    step: Annotated[int, "optimiser steps done; the first one is 1"]
    num_steps: Annotated[int, "of the whole run"]
    at_s: Annotated[float, "Unix time of its end"]
    loss: Annotated[float, "mean of the step's answer tokens, nats"]
    learning_rate: float
    grad_norm: Annotated[float, "length of the gradient before clipping"]
    num_tokens: Annotated[int, "tokens of its micro-batches, with padding"]
    tokens_per_s: Annotated[float, "of the step's forward and backward, without evaluations and checkpoints"]
    remaining_s: Annotated[float, "forecast of the time to the end, seconds"]
    memory_bytes: Annotated[int, "resident memory of the process, with mapped files"]
    eval_loss: Annotated[float | None, "held-out loss after the step, nats; NULL: not evaluated"] = None
    expert_load: npt.NDArray[np.uint32] | None = None
    """Tokens routed to each expert, [MoE layers, experts]; None: not counted."""
