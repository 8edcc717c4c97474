"""Modules that get low-rank factors, and PEFT's configuration of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from twofold.api.errors import ConfigError
from twofold.training.base import expert_modules, text_names

_ATTENTION: Final = (
    "q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "in_proj_qkv",
    "in_proj_z", "in_proj_qkvz", "out_proj",
)  # fmt: skip
_FEED_FORWARD: Final = ("gate_proj", "up_proj", "down_proj")
_SHARED: Final = "shared"
"""Part of the names of experts that every token goes to."""
GROUPS: Final = ("attention", "dense", "shared", "experts")
"""Names of groups of modules: attention, dense layers, shared experts, routed experts."""


@dataclass(frozen=True)
class Targets:
    """The modules of one model that get factors, by transformers' names."""

    linears: tuple[str, ...]
    """Full names of linear layers."""
    stacks: tuple[str, ...]
    """Full names of the parameters of routed experts."""
    factor_sizes: tuple[int, ...]
    """Trained parameters per unit of rank, of each."""

    def num_parameters(self, rank: int) -> int:
        return rank * sum(self.factor_sizes)

    def lora_config(self, *, rank: int, alpha: float, base: str) -> Any:
        """PEFT's configuration. base: name or path of the model, for the adapter's readers."""
        from peft import LoraConfig

        return LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules="|".join(map(re.escape, self.linears)) or [],
            target_parameters=list(self.stacks) or None,
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )


def find_targets(model: nn.Module, wanted: Sequence[str] = GROUPS) -> Targets:
    """The modules of `model` that `wanted` names: groups, or last parts of modules' names.

    The model may lie on torch's meta device. Raises ConfigError for a name that no module has.
    """
    is_of_text = text_names(model)
    linears = {
        name: each for name, each in model.named_modules() if isinstance(each, nn.Linear) and is_of_text(name)
    }
    stacks = _stacks(model)
    chosen: dict[str, int] = {}
    for word in wanted:
        found = {name: each for name, each in linears.items() if _is_of(name, word)}
        sizes = {name: each.in_features + each.out_features for name, each in found.items()}
        sizes |= {name: size for name, size in stacks.items() if word in ("experts", name.rpartition(".")[2])}
        if not sizes and word not in GROUPS:
            names = sorted({name.rpartition(".")[2] for name in (*linears, *stacks)})
            raise ConfigError(
                f"--targets was given {word!r}, which no module of this model is called; it takes {', '.join(GROUPS)}, "
                f"or names among {', '.join(names)}"
            )
        chosen |= sizes
    if not chosen:
        raise ConfigError(f"--targets was given {','.join(wanted)}; this model has none of these modules")
    return Targets(
        tuple(name for name in chosen if name in linears),
        tuple(name for name in chosen if name in stacks),
        tuple(chosen.values()),
    )


def _stacks(model: nn.Module) -> dict[str, int]:
    """Trained parameters per unit of rank of each parameter of routed experts that holds matrices."""
    experts = set(map(id, expert_modules(model)))
    return {
        f"{name}.{own}": parameter.shape[0] * sum(parameter.shape[1:])
        for name, module in model.named_modules()
        if id(module) in experts
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    }


def _is_of(name: str, word: str) -> bool:
    last = name.rpartition(".")[2]
    if word == "attention":
        return last in _ATTENTION
    if word in ("dense", "shared"):
        return last in _FEED_FORWARD and (_SHARED in name) == (word == "shared")
    return last == word
