"""`--optimize-config` for an engine: checks the rules against this machine and this run, and applies them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from twofold import _core
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.blocks import ops
from twofold.blocks.block import ExpertBlock
from twofold.experts.accelerator import AcceleratorChoice
from twofold.models import ModelFiles
from twofold.rules.decisions import Decision, decide
from twofold.rules.placement import read_placement_rules
from twofold.step.model import PerModule

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModuleRules:
    """Rule decisions that remain once formats are settled."""

    devices: tuple[str, ...] = ()
    """Expert device per MoE layer: auto, cpu (never in a slot) or gpu (always). Empty: all auto."""
    threads: PerModule[int] | None = None
    """Threads of the pool per module, 0 for all; None: all."""
    pools: PerModule[ops.ThreadPool] | None = None
    """Per-module views of the pool with that module's kernels; None: the process's kernels."""
    on_cpu: tuple[bool, ...] = ()
    """Per module, whether the CPU computes it beside an emulated accelerator. Empty: none."""
    expert_pools: tuple[ops.ThreadPool, ...] = ()
    """Pool views of the MoE layers."""

    @property
    def levels(self) -> tuple[str, ...]:
        """CPU kernel level per module; empty where all use the process's level."""
        if self.pools is None:
            return ()
        return tuple(view.level for view in (self.pools.embedding, *self.pools.blocks, self.pools.head))

    def set_kernels(self, store: _core.ExpertStore) -> None:
        """Set the kernels of the experts in `store`."""
        for layer, view in enumerate(self.expert_pools):
            store.set_kernels(layer, view)


def apply_rules(
    config: EngineConfig, files: ModelFiles, pool: ops.ThreadPool, choice: AcceleratorChoice
) -> tuple[ModelFiles, ModuleRules]:
    """`files` in the formats that the rules of `config` ask for, and the remaining decisions.

    Raises ConfigError, with file and line, for a rule that cannot be met.
    """
    if config.optimize_config is None:
        return files, ModuleRules()
    rules = read_placement_rules(config.optimize_config)
    files, decisions = decide(files, rules, pool)
    for decision in decisions:
        _check(decision, pool, choice)
    pools = [_pool(decision, pool, choice) for decision in decisions]
    if config.packed_cache is not None and any(files.recoded_formats):
        raise ConfigError(
            f"--optimize-config {config.optimize_config} changes formats, but --packed-cache keeps the formats of the "
            "files; leave one out, or write the model in these formats with `twofold quantize`"
        )
    for rule in rules:
        for note in rule.notes:
            _log.info("%s: %s", rule.where, note)
    ruled = sum(decision.rule is not None for decision in decisions)
    _log.info(
        "--optimize-config %s: %d of %d modules matched by %d rules",
        config.optimize_config,
        ruled,
        len(decisions),
        len(rules),
    )
    views = _pools(pools) if any(decision.backend != "auto" for decision in decisions) else None
    of_experts = [
        view
        for decision, view in zip(decisions, pools, strict=True)
        if isinstance(decision.module.part, ExpertBlock)
    ]
    on_cpu = tuple(
        decision.device == "cpu" and not isinstance(decision.module.part, ExpertBlock)
        for decision in decisions
    )
    return files, ModuleRules(
        _devices(decisions),
        _threads(decisions),
        pools=views,
        on_cpu=on_cpu if any(on_cpu) else (),
        expert_pools=tuple(of_experts) if views is not None else (),
    )


def _devices(decisions: Sequence[Decision]) -> tuple[str, ...]:
    found = tuple(each.device for each in decisions if isinstance(each.module.part, ExpertBlock))
    return () if set(found) == {"auto"} else found


def _pools(views: Sequence[ops.ThreadPool]) -> PerModule[ops.ThreadPool]:
    embedding, *blocks, head = views
    return PerModule(embedding, tuple(blocks), head)


def _pool(decision: Decision, pool: ops.ThreadPool, choice: AcceleratorChoice) -> ops.ThreadPool:
    """A view of `pool` with the kernels of the module's level. Raises ConfigError if that level is not available."""
    rule, module = decision.rule, decision.module
    if rule is None or rule.backend == "auto":
        return pool
    if choice.kind == "cuda" and not isinstance(module.part, ExpertBlock):
        raise ConfigError(
            f"{rule.where}: backend {rule.backend} was given for {module.name}, which runs on the GPU; levels select "
            "CPU kernels: leave the backend out, or narrow the rule to class: experts"
        )
    try:
        return pool.at_level(rule.backend)
    except ConfigError as error:
        raise ConfigError(
            f"{rule.where}: backend {rule.backend} was given for {module.name}: {error}"
        ) from None


def _threads(decisions: Sequence[Decision]) -> PerModule[int] | None:
    embedding, *blocks, head = (decision.threads for decision in decisions)
    return PerModule(embedding, tuple(blocks), head) if any((embedding, *blocks, head)) else None


def _check(decision: Decision, pool: ops.ThreadPool, choice: AcceleratorChoice) -> None:
    rule, module = decision.rule, decision.module
    if rule is None:
        return
    has_accelerator = choice.kind != "none"
    if rule.device == "gpu" and not has_accelerator:
        raise ConfigError(
            f"{rule.where}: device gpu was given for {module.name}, but there is no accelerator ({choice.reason}); "
            "choose one with --accelerator, or leave the device out"
        )
    if rule.device == "cpu" and choice.kind == "cuda" and not isinstance(module.part, ExpertBlock):
        raise ConfigError(
            f"{rule.where}: device cpu was given for {module.name}, which is part of the device's decode graph; only "
            "routed experts can run on the CPU: leave the device out, narrow the rule to class: experts, or run "
            "all on the CPU with --accelerator none"
        )
    if rule.threads is None:
        return
    if rule.threads > pool.num_threads:
        raise ConfigError(
            f"{rule.where}: threads {rule.threads} was given, but the engine has {pool.num_threads}; raise "
            "--cpu-threads or lower the rule's number"
        )
    if choice.kind == "cuda" or pool.num_nodes > 1:
        why = (
            "dense modules run on the GPU, and experts beside it on all threads"
            if choice.kind == "cuda"
            else f"threads are bound to {pool.num_nodes} memory nodes, each to its own weights (--numa off frees them)"
        )
        raise ConfigError(
            f"{rule.where}: threads of one module cannot be limited here: {why}; set --cpu-threads for all instead"
        )
