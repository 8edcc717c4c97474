"""Settings of an adapter that its tensors do not give: scales, and facts about the program that wrote them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Pattern:
    """Values by pattern of module names, as PEFT's rank_pattern and alpha_pattern: the first match counts."""

    plain: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """(place in the file, value) by the ending of a module's name."""
    expressions: tuple[tuple[int, re.Pattern[str], float], ...] = ()

    def value(self, module: str) -> float | None:
        """Value of the first pattern that matches `module`; None: no pattern does."""
        found = [self.plain[ending] for ending in _endings(module) if ending in self.plain]
        found += [(place, value) for place, expression, value in self.expressions if expression.match(module)]
        return min(found)[1] if found else None


@dataclass(frozen=True)
class AdapterSettings:
    """Settings of one adapter. The defaults are those of files that do not give them."""

    file: Path
    """File named in errors."""
    alpha: float | None
    """Scale times rank; None: the scale is 1."""
    rank: int | None = None
    """Rank of modules that no pattern matches; None: any."""
    by_root: bool = False
    """rsLoRA: the scale is alpha / sqrt(rank)."""
    ranks: Pattern = field(default_factory=Pattern)
    alphas: Pattern = field(default_factory=Pattern)
    base_name: str = ""
    version: tuple[int, ...] | None = None
    """PEFT's version (major, minor, patch); None: not given, or none that was released."""
    expert_columns: str | None = None
    """Unsloth's lora_B_layout: rank_major or grouped_by_expert; None: not given."""
    by_unsloth: bool = False

    def rank_of(self, module: str) -> int | None:
        """Rank of a module's product; None: any."""
        value = self.ranks.value(module)
        return self.rank if value is None else int(value)

    def scale(self, module: str, rank: int) -> float:
        """Factor of a module's product of this rank."""
        value = self.alphas.value(module)
        alpha = self.alpha if value is None else value
        if alpha is None:
            return 1.0
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def _endings(module: str) -> Iterator[str]:
    """A module's name, and what follows each of its dots."""
    while True:
        yield module
        _, dot, module = module.partition(".")
        if not dot:
            return
