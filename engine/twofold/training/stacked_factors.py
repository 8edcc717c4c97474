"""Trained factors of stacks that hold gate and up together, and transformers' module that has no implementations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twofold.training.factors import Factors


def halves(both: Factors | None, *, is_concatenated: bool = True) -> tuple[Factors | None, Factors | None]:
    """Factors of gate and of up, whose rows are halves of the fused ones', or alternate."""
    if both is None:
        return None, None
    gate, up = both.b.chunk(2, dim=1) if is_concatenated else (both.b[:, 0::2], both.b[:, 1::2])
    return Factors(both.a, gate, both.scale), Factors(both.a, up, both.scale)


def experts_of_scaled_rows(module: Any, hidden: Tensor) -> Tensor:
    """Routed experts of Llama 4, in place of the module's `forward`.

    hidden: [experts tokens, hidden], each token's row for each expert, scaled by its score. Scores of experts that a
    token is not routed to are zero, as are their rows, results and gradients.
    """
    rows = hidden.detach().any(dim=-1).nonzero()[:, 0]
    ids = (rows // (len(hidden) // module.num_experts))[:, None]
    given: dict[str, Factors] = getattr(module, "twofold_factors", {})
    factors = (*halves(given.get("gate_up_proj")), given.get("down_proj"))
    found = module.twofold_layer(hidden[rows], ids, torch.ones(len(rows), 1, device=hidden.device), factors)
    return torch.zeros_like(hidden).index_add(0, rows, found)
