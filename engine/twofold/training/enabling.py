"""Lets transformers and PEFT train models whose experts Twofold holds.

transformers has a public table of experts' implementations. PEFT's `target_parameters` would add B A to a parameter
before each forward, as large as all experts; here its wrapper hands the factors to our experts instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from twofold.api.errors import ConfigError
from twofold.training.base import IMPLEMENTATION
from twofold.training.experts import ExpertLayer
from twofold.training.factors import Factors

_OLDEST_PEFT: Final = (0, 19, 1)
"""Before it, PEFT took an expert's inputs for its outputs."""


def enable() -> None:
    """Register our experts with transformers, and with PEFT if it is installed. Safe to call twice.

    Raises ConfigError for a PEFT whose adapters of experts have another layout.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    try:
        import peft
        from peft.tuners.lora.layer import ParamWrapper
    except ImportError:
        return
    version = tuple(int(part) for part in peft.__version__.split(".")[:3] if part.isdigit())
    if version < _OLDEST_PEFT:
        raise ConfigError(f"peft {peft.__version__} is installed; training experts takes 0.19.1 or newer")
    if not getattr(ParamWrapper._activate_lora, "hands_over", False):
        setattr(ParamWrapper, "_activate_lora", _handing_over(ParamWrapper._activate_lora))  # noqa: B010


def experts_forward(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Routed experts of a transformers module that `open_base` prepared.

    hidden: [tokens, hidden]; top_k_index, top_k_weights: [tokens, top_k].
    """
    layer: ExpertLayer = module.twofold_layer
    given: dict[str, Factors] = getattr(module, "twofold_factors", {})
    gate, up = _halves(module, given.get("gate_up_proj"))
    return layer(hidden, top_k_index, top_k_weights, (gate, up, given.get("down_proj")))


def _halves(module: Any, both: Factors | None) -> tuple[Factors | None, Factors | None]:
    """Factors of gate and of up, whose rows are halves of the fused ones', or alternate."""
    if both is None:
        return None, None
    gate, up = both.b.chunk(2, dim=1) if module.is_concatenated else (both.b[:, 0::2], both.b[:, 1::2])
    return Factors(both.a, gate, both.scale), Factors(both.a, up, both.scale)


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
    """One adapter's factors of a wrapped stack: PEFT has A [experts rank, in] and B [out, rank experts]."""
    num_experts = wrapper.num_experts
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    return Factors(
        a.reshape(num_experts, -1, a.shape[-1]),
        b.reshape(b.shape[0], -1, num_experts).permute(2, 0, 1),
        float(wrapper.scaling[adapter]),
    )


def _joined(active: list[Factors]) -> Factors:
    """Several active adapters as one of their ranks together."""
    if len(active) == 1:
        return active[0]
    return Factors(
        torch.cat([each.a for each in active], dim=1),
        torch.cat([each.b * each.scale for each in active], dim=2),
    )
