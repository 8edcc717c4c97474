"""Which rank holds which routed experts, where several processes share a model's weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twofold import _core
from twofold.api.errors import ConfigError
from twofold.api.parallel_config import ParallelConfig
from twofold.blocks.panels import CutPanels
from twofold.experts.expert_statistics import I64


@dataclass(frozen=True)
class ExpertSpread:
    """The ranks, and the holders of each expert as bit masks [layers * experts]: bit r stands for rank r."""

    ranks: _core.Ranks
    holders: list[int]


class RankShare(CutPanels):
    """This process's share of one model's weights: its matrices, and which experts are its own."""

    def __init__(self, ranks: _core.Ranks, config: ParallelConfig) -> None:
        super().__init__(ranks, config.tensor_parallel_min_bytes)
        self.config = config

    def spread(self, num_layers: int, num_experts: int, counts: I64 | None) -> ExpertSpread | None:
        """The spread of a model's experts; None: rank 0 holds all. counts: uses [layers, experts], if known.

        Raises:
            ConfigError: --num-redundant-experts without counts.
        """
        if not self.config.enable_expert_parallel or num_layers == 0:
            return None
        redundant = self.config.num_redundant_experts
        if redundant and counts is None:
            raise ConfigError(
                f"--num-redundant-experts {redundant} was given without --init-expert-location, which says what "
                "experts are used most; record it with `twofold ctl experts`"
            )
        if counts is None:
            counts = np.zeros((num_layers, num_experts), np.int64)
        masks = [holders_of_layer(of_layer, self.ranks.size, redundant) for of_layer in counts]
        return ExpertSpread(self.ranks, [mask for of_layer in masks for mask in of_layer])


def holders_of_layer(counts: I64, num_ranks: int, num_redundant: int = 0) -> list[int]:
    """Holders of a layer's experts as bit masks, so that every rank has about as many uses, and as many experts.

    The `num_redundant` most used experts are on every rank. The others go, most used first, to the rank with the fewest
    uses so far among those with room. Experts that are used alike are dealt out in turn.
    """
    num_experts = len(counts)
    order = np.argsort(-counts, kind="stable").tolist()
    masks = [0] * num_experts
    for expert in order[:num_redundant]:
        masks[expert] = (1 << num_ranks) - 1
    rest = order[num_redundant:]
    room = -(-len(rest) // num_ranks)
    uses, held = [0] * num_ranks, [0] * num_ranks
    for expert in rest:
        free = (rank for rank in range(num_ranks) if held[rank] < room)
        rank = min(free, key=lambda rank: (uses[rank], held[rank]))
        masks[expert] = 1 << rank
        uses[rank] += int(counts[expert])
        held[rank] += 1
    return masks
