"""Evaluation of placement rules for the modules of one model; checks headers only, loads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from twofold.api.errors import ConfigError
from twofold.blocks import ops
from twofold.blocks.block import ExpertBlock
from twofold.blocks.recoding import Recoding
from twofold.models.model_files import ModelFiles
from twofold.rules.modules import Module, modules_of
from twofold.rules.placement import PlacementRule, choose_rules
from twofold.weights.weight_format import FORMATS


@dataclass(frozen=True, eq=False)
class Decision:
    """One module and the rule that applies to it."""

    module: Module
    rule: PlacementRule | None

    @property
    def device(self) -> str:
        return self.rule.device if self.rule is not None else "auto"

    @property
    def threads(self) -> int:
        """Number of threads; 0: all."""
        return (self.rule.threads or 0) if self.rule is not None else 0

    @property
    def backend(self) -> str:
        return self.rule.backend if self.rule is not None else "auto"


def decide(
    files: ModelFiles, rules: Sequence[PlacementRule], pool: ops.ThreadPool | None
) -> tuple[ModelFiles, list[Decision]]:
    """The model with its format conversions, and the other decisions for its modules, in the order of
    `ModelFiles.parts`.

    Args:
        pool: converts the formats; None: only headers are read.

    A router's gate, norms and biases stay exact under any rule.

    Raises ConfigError for a rule that matches nothing, and for a format whose blocks do not fill a module's rows.
    """
    modules = modules_of(files)
    chosen = choose_rules(rules, modules, files.config.num_layers)
    _check_formats(rules, modules, chosen)
    recodings = [_recoding(files, module, rule, pool) for module, rule in zip(modules, chosen, strict=True)]
    if any(recoding is not None for recoding in recodings):
        files = files.recoded(recodings)
    weights = (weights for _, weights in files.parts())
    return files, [
        Decision(replace(module, weights=of_part), rule)
        for module, rule, of_part in zip(modules, chosen, weights, strict=True)
    ]


def _check_formats(
    rules: Sequence[PlacementRule], modules: Sequence[Module], chosen: Sequence[PlacementRule | None]
) -> None:
    """Raises ConfigError if no module of a rule can have its format; modules that cannot are skipped."""
    for rule in rules:
        of_rule = [module for module, by in zip(modules, chosen, strict=True) if by is rule]
        if rule.format is not None and not any(module.recodable for module in of_rule):
            classes = sorted(set().union(*(module.classes for module in of_rule)))
            raise ConfigError(
                f"{rule.where}: format {rule.format} was given for {of_rule[0].name}, whose weights stay exact "
                f"({', '.join(classes)}: gates, norms and biases are never quantised); leave it out of the rule"
            )


def _recoding(
    files: ModelFiles, module: Module, rule: PlacementRule | None, pool: ops.ThreadPool | None
) -> Recoding | None:
    if rule is None or rule.format is None:
        return None
    if not module.recodable:  # a router's gate, a norm
        return None
    if files.mapped is not None:
        raise ConfigError(
            f"{rule.where}: format {rule.format} was given, but this model is packed and its panels keep the "
            "formats they were written in; give the model that it was packed from"
        )
    for name, columns in _rows(module):
        if columns % FORMATS[rule.format].block_columns:
            fitting = [
                name
                for name, layout in FORMATS.items()
                if layout.quantised and columns % layout.block_columns == 0
            ]
            raise ConfigError(
                f"{rule.where}: {name} has rows of {columns} weights, which do not fill blocks of "
                f"{FORMATS[rule.format].block_columns} of format {rule.format}; those that fit are {', '.join(fitting)}"
            )
    return Recoding(rule.format, pool)


def _rows(module: Module) -> Iterator[tuple[str, int]]:
    part, weights = module.part, module.weights
    if isinstance(part, ExpertBlock):
        groups = part.of_one_size(weights)
        specs = tuple(spec for group, own in groups for spec in group.stacked_experts(own))
    else:
        specs = tuple(weights.specs[name] for name in module.recodable)
    for spec in specs:
        yield spec.name, spec.shape[-1]
