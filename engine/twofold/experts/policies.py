"""Cache policies as the engine's callers see them; the policies themselves are defined in the core's registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from twofold import _core
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.api.placement_config import BY_POLICY

POLICIES: Final[Mapping[str, _core.CachePolicy]] = {policy.name: policy for policy in _core.cache_policies()}
"""Policies by name. Offline ones need to know the future, which only `twofold lab` does."""

SERVING: Final = tuple(policy.name for policy in POLICIES.values() if not policy.offline)


def described(names: tuple[str, ...]) -> str:
    """Each policy and its description, for a flag's help."""
    return "; ".join(f"{name}: {POLICIES[name].help}" for name in names)


def check_policy(config: EngineConfig) -> None:
    """Refuse impossible settings of the expert cache, whether or not this machine has slots.

    Raises:
        ConfigError: unknown policy, one that needs the future, or prefetching under one that moves nothing.
    """
    if config.policy not in SERVING:
        why = "; it needs future routing, which only `twofold lab` has" if config.policy in POLICIES else ""
        raise ConfigError(f"--policy is {config.policy!r}; expected one of {', '.join(SERVING)}{why}")
    if config.prefetch == "on" and POLICIES[config.policy].prefetches == "never":
        raise ConfigError(
            f"--prefetch on was given with --policy {config.policy}, which moves no expert once its slots are full; "
            "leave --prefetch out or choose another policy"
        )


def prefetches(config: EngineConfig) -> bool:
    """Whether the next layer's predicted experts are uploaded in advance."""
    if config.expert_placement_strategy != BY_POLICY:
        return False
    return config.prefetch == "on" or (
        config.prefetch == "auto" and POLICIES[config.policy].prefetches == "auto"
    )


def check_names(names: list[str]) -> None:
    """Raises ConfigError for an unknown policy name; offline ones are known."""
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"policy {name!r} is unknown; expected one of {', '.join(POLICIES)}")
