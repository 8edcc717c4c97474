"""Lets transformers and PEFT train models whose experts Twofold holds.

transformers has a public table of experts' implementations. PEFT's `target_parameters` would add B A to a parameter
before each forward, as large as all experts; here its wrapper hands the factors to our experts instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from twofold.training.base import IMPLEMENTATION
from twofold.training.experts import ExpertLayer
from twofold.training.factors import Factors
from twofold.training.loading import hook_from_pretrained
from twofold.training.stacked_factors import halves


def enable() -> None:
    """Let `from_pretrained` load MoE models over our experts, and PEFT train these. Safe to call twice."""
    from transformers import PreTrainedModel

    register_experts()
    hook_from_pretrained(PreTrainedModel, prepare=register_experts)


def register_experts() -> None:
    """Register our experts with transformers, and with PEFT if it is installed. Safe to call twice."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    try:
        from peft.tuners.lora.layer import ParamWrapper
    except ImportError:
        return
    if not getattr(ParamWrapper._activate_lora, "hands_over", False):
        setattr(ParamWrapper, "_activate_lora", _handing_over(ParamWrapper._activate_lora))  # noqa: B010


def experts_forward(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Routed experts of a transformers module that `open_base` prepared.

    hidden: [tokens, hidden]; top_k_index, top_k_weights: [tokens, top_k].
    """
    layer: ExpertLayer = module.twofold_layer
    given: dict[str, Factors] = getattr(module, "twofold_factors", {})
    # transformers before 5.10 does not say it; there the stacks that alternate are those of gpt-oss, with biases.
    is_concatenated = getattr(module, "is_concatenated", not (module.is_transposed and module.has_bias))
    gate, up = halves(given.get("gate_up_proj"), is_concatenated=is_concatenated)
    return layer(hidden, top_k_index, top_k_weights, (gate, up, given.get("down_proj")))


def _handing_over(original: Callable[..., Any]) -> Callable[..., Any]:
    """PEFT's context manager, which for modules of ours only says which factors are active."""

    @contextmanager
    def activate(wrapper: Any, active_adapters: list[str]) -> Iterator[None]:
        module = wrapper.get_base_layer()
        if not hasattr(module, "twofold_layer"):
            with original(wrapper, active_adapters):
                yield
            return
        active = [_factors(wrapper, name) for name in active_adapters if name in wrapper.lora_A]
        given = dict(getattr(module, "twofold_factors", {}))
        if active:
            given[wrapper.parameter_name] = _joined(active)
        before, module.twofold_factors = getattr(module, "twofold_factors", {}), given
        try:
            yield
        finally:
            module.twofold_factors = before

    activate.hands_over = True  # type: ignore[attr-defined]
    return activate


def _factors(wrapper: Any, adapter: str) -> Factors:
    """One adapter's factors of a wrapped stack: PEFT has A [experts rank, in] and B [out, rank experts].

    PEFT before 0.19.1 takes every stack for [experts, in, out]. Later versions swap both unless the module says that it
    is transposed; Llama 4's is and does not say so.
    """
    num_experts = wrapper.num_experts
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    a = a.reshape(num_experts, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, num_experts).permute(2, 0, 1)
    if getattr(wrapper, "_did_swap_in_out_features", False) == getattr(
        wrapper.get_base_layer(), "is_transposed", True
    ):
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return Factors(a, b, float(wrapper.scaling[adapter]))


def _joined(active: list[Factors]) -> Factors:
    """Several active adapters as one of their ranks together."""
    if len(active) == 1:
        return active[0]
    return Factors(
        torch.cat([each.a for each in active], dim=1),
        torch.cat([each.b * each.scale for each in active], dim=2),
    )
