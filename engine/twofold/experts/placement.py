"""Initial expert placement: the strategies, as masks over (layer, expert).

They match those of KTransformers, expert for expert, so that a comparison compares engines and not placements.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.api.placement_config import BY_POLICY
from twofold.experts.expert_statistics import I64, read_statistics

_log = logging.getLogger(__name__)

Mask = npt.NDArray[np.bool_]
"""[layers, experts]"""

STRATEGIES: Final[Mapping[str, str]] = {
    BY_POLICY: "the cache policy decides, at start and while serving",
    "uniform": "the first experts of each layer",
    "frequency": "the most used experts of --init-expert-location, over all layers",
    "front-loading": "all experts of the first layers",
    "random": "random with seed 42, over all layers",
}
"""Placement strategies. All but the first are static: slots keep their initial experts."""

_SEED: Final = 42


def placement_mask(strategy: str, layers: int, experts: int, slots: int, counts: I64 | None = None) -> Mask:
    """Experts in `slots` slots; all experts if there are more slots than experts.

    If slots do not divide by layers, `uniform` gives the first layers one more. `frequency` takes the most counted over
    all layers; ties go to the lower layer and number. `counts` are [layers, experts].
    """
    total = layers * experts
    slots = min(slots, total)
    if strategy == "frequency":
        if counts is None or counts.shape != (layers, experts):
            raise ValueError(f"counts of {layers} layers of {experts} experts are needed")
        order = np.argsort(-counts.ravel(), kind="stable")
    elif strategy == "random":
        order = _permutation(total)
    elif strategy == "uniform":
        order = np.arange(total).reshape(layers, experts).T.ravel()
    elif strategy == "front-loading":
        order = np.arange(total)
    else:
        raise ValueError(f"{strategy!r} is not a static placement strategy")
    mask = np.zeros(total, np.bool_)
    mask[order[:slots]] = True
    return mask.reshape(layers, experts)


def _permutation(count: int) -> I64:
    """Result of torch.randperm with this seed, without torch: both use the same Mersenne twister."""
    draws = np.random.RandomState(_SEED).randint(0, 2**32, size=max(count - 1, 0), dtype=np.uint32)
    order = np.arange(count)
    for place, draw in enumerate(draws.tolist()):
        other = place + draw % (count - place)
        order[place], order[other] = order[other], order[place]
    return order


@dataclass(frozen=True)
class InitialPlacement:
    """Initial contents of the slots, before the first request."""

    strategy: str
    counts: I64 | None = None
    """Counts [layers, experts] of `--init-expert-location`."""

    @property
    def is_static(self) -> bool:
        return self.strategy != BY_POLICY

    def mask(self, layers: int, experts: int, slots: int, *, is_pool: bool = True) -> Mask | None:
        """Experts to place; None: none, the policy fills the slots.

        Args:
            is_pool: any layer may have any slot, as under all static strategies; else each has its even share.
        """
        if self.is_static:
            return placement_mask(self.strategy, layers, experts=experts, slots=slots, counts=self.counts)
        if self.counts is None:
            return None
        if is_pool:
            return placement_mask("frequency", layers, experts=experts, slots=slots, counts=self.counts)
        share = placement_mask("uniform", layers, experts, slots)
        mask = np.zeros_like(share)
        np.put_along_axis(mask, np.argsort(-self.counts, axis=1, kind="stable"), share, axis=1)
        return mask


PLACED_BY_POLICY: Final = InitialPlacement(BY_POLICY)


def initial_placement(
    config: EngineConfig, moe_layers: Sequence[int], num_experts: int, *, num_mtp_layers: int = 0
) -> InitialPlacement:
    """Initial placement from the configuration and the file that it names.

    num_mtp_layers: how many of the last `moe_layers` the file may lack.

    Raises:
        ConfigError: the file is broken, or counts another model's experts.
    """
    strategy, file = config.expert_placement_strategy, config.init_expert_location
    counts = None
    if file is not None and strategy in ("uniform", "front-loading", "random"):
        _log.warning("--init-expert-location %s is ignored: strategy %s uses no counts", file, strategy)
    elif (
        file is not None
        and strategy == BY_POLICY
        and config.cache_state
        and Path(config.cache_state).exists()
    ):
        _log.info(
            "--init-expert-location %s is ignored: --cache-state %s overrides it", file, config.cache_state
        )
    elif file is not None:
        counts = read_statistics(
            file,
            len(moe_layers),
            num_experts,
            moe_layers=moe_layers,
            num_mtp_layers=num_mtp_layers,
        )
    return InitialPlacement(strategy, counts)


def check_placement(config: EngineConfig) -> None:
    """Refuse contradictory placement settings; log which of two takes precedence.

    Raises:
        ConfigError: names the settings, and which to remove or add.
    """
    strategy = config.expert_placement_strategy
    if config.gpu_experts_ratio is not None and config.num_gpu_experts is not None:
        _log.warning(
            "--num-gpu-experts %d is ignored: --gpu-experts-ratio %g overrides it",
            config.num_gpu_experts,
            config.gpu_experts_ratio,
        )
    if strategy == "frequency" and config.init_expert_location is None:
        raise ConfigError(
            "--expert-placement-strategy frequency was given without --init-expert-location; give a file of expert "
            "statistics: record one with --record-gpu-expert-distribution, or take SGLang's .pt"
        )
    if (
        config.enable_dynamic_expert_update
        and config.gpu_prefill_token_threshold > config.max_num_batched_tokens
    ):
        raise ConfigError(
            f"--gpu-prefill-token-threshold {config.gpu_prefill_token_threshold} was given with "
            f"--max-num-batched-tokens {config.max_num_batched_tokens}: no step has that many "
            "tokens, so --enable-dynamic-expert-update has no effect; lower the threshold or raise the other"
        )
    if strategy == BY_POLICY:
        return
    if config.policy != EngineConfig.policy:
        raise ConfigError(
            f"--policy {config.policy} was given with --expert-placement-strategy {strategy}, under which no expert "
            "moves by a policy; leave one of them out"
        )
    if config.prefetch == "on":
        raise ConfigError(
            f"--prefetch on was given with --expert-placement-strategy {strategy}, under which no expert moves; leave "
            "one of them out"
        )
    if config.cache_state is not None:
        raise ConfigError(
            f"--cache-state was given with --expert-placement-strategy {strategy}, which places experts at every "
            "start; leave one of them out (twofold placement export keeps a placement for --init-expert-location)"
        )
