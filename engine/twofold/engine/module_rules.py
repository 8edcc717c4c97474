"""`--optimize-config` for an engine: what rules ask for, held against what this machine and this run can do."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.blocks import ops
from twofold.blocks.block import ExpertBlock
from twofold.engine.model import ModuleThreads
from twofold.experts.accelerator import AcceleratorChoice
from twofold.models import ModelFiles
from twofold.rules.decisions import Decision, decide
from twofold.rules.placement import read_placement_rules

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModuleRules:
    """What is left to do once formats are settled."""

    devices: tuple[str, ...] = ()
    """Of the experts of each layer that has any: auto, cpu (never in a slot), gpu (always); none given: all auto."""
    threads: ModuleThreads | None = None


def apply_rules(
    config: EngineConfig, files: ModelFiles, pool: ops.ThreadPool, choice: AcceleratorChoice
) -> tuple[ModelFiles, ModuleRules]:
    """`files` in the formats that the rules of `config` ask for, and what else they ask for.

    Raises ConfigError, with file and line, for what cannot be met.
    """
    if config.optimize_config is None:
        return files, ModuleRules()
    rules = read_placement_rules(config.optimize_config, files.config.architecture)
    files, decisions = decide(files, rules, pool)
    for decision in decisions:
        _check(decision, pool, choice)
    if config.packed_cache is not None and any(files.recoded_formats):
        raise ConfigError(
            f"--optimize-config {config.optimize_config} asks for formats and --packed-cache was given, which "
            "keeps the "
            "files' own; leave one out, or write the model in these formats with `twofold quantize`"
        )
    for rule in rules:
        for note in rule.notes:
            _log.info("%s: %s", rule.where, note)
    ruled = sum(decision.rule is not None for decision in decisions)
    _log.info(
        "--optimize-config %s: %d of %d modules are under %d rules",
        config.optimize_config, ruled, len(decisions), len(rules),
    )  # fmt: skip
    return files, ModuleRules(_devices(decisions), _threads(decisions))


def _devices(decisions: Sequence[Decision]) -> tuple[str, ...]:
    found = tuple(each.device for each in decisions if isinstance(each.module.part, ExpertBlock))
    return () if set(found) == {"auto"} else found


def _threads(decisions: Sequence[Decision]) -> ModuleThreads | None:
    embedding, *blocks, head = (decision.threads for decision in decisions)
    return ModuleThreads(embedding, tuple(blocks), head) if any((embedding, *blocks, head)) else None


def _check(decision: Decision, pool: ops.ThreadPool, choice: AcceleratorChoice) -> None:
    rule, module = decision.rule, decision.module
    if rule is None:
        return
    has_accelerator = choice.kind != "none"
    if rule.device == "gpu" and not has_accelerator:
        raise ConfigError(
            f"{rule.where}: device gpu was given for {module.name}, but there is no accelerator "
            f"({choice.reason}); choose one "
            "with --accelerator, or leave the device out"
        )
    if rule.device == "cpu" and has_accelerator and not isinstance(module.part, ExpertBlock):
        raise ConfigError(
            f"{rule.where}: device cpu was given for {module.name}, which runs where the accelerator "
            f"{choice.label} is: only "
            "routed experts are placed one by one; leave the device out, narrow the rule to class: experts, or run all "
            "on the CPU with --accelerator none"
        )
    level = ops.isa_choice()[0]
    if rule.backend not in ("auto", level):
        raise ConfigError(
            f"{rule.where}: backend {rule.backend} was given, this process runs {level}; a process has one "
            "level of kernels "
            f"for all modules: start it with TWOFOLD_ISA={rule.backend}, or leave the backend out"
        )
    if rule.threads is None:
        return
    if rule.threads > pool.num_threads:
        raise ConfigError(
            f"{rule.where}: threads {rule.threads} was given, the engine has {pool.num_threads}; raise "
            "--cpu-threads or "
            "lower the rule's"
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
