"""`twofold rules explain`: the matching rule and the settings in force for each module. Loads no weights."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from twofold.blocks import ops
from twofold.models.bundled import bundled_model_path
from twofold.models.model_files import open_model_files
from twofold.rules.decisions import Decision, decide
from twofold.rules.placement import SHIPPED, read_placement_rules
from twofold.tools.cli.terminal_text import ranges, table

_HEADS: Final = ("modules", "class", "rule", "device", "format", "level", "threads", "MB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="model directory or GGUF file (default: the bundled model)")
    parser.add_argument(
        "--optimize-config",
        default=SHIPPED,
        metavar="FILE",
        help="YAML file of rules (default: those that come with Twofold for the model's family)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, a line for each module")


def run(args: argparse.Namespace) -> int:
    path = Path(args.model).expanduser() if args.model else bundled_model_path()
    files = open_model_files(path, "keep")
    rules = read_placement_rules(args.optimize_config)
    _, decisions = decide(files, rules, None)
    if args.json:
        notes = [f"{rule.where}: {note}" for rule in rules for note in rule.notes]
        modules = [_described(each) for each in decisions]
        print(json.dumps({"model": str(path), "modules": modules, "notes": notes}))
        return 0
    print(*table(_HEADS, list(_rows(decisions))), sep="\n")
    for rule in rules:
        for note in rule.notes:
            print(f"note: {rule.where}: {note}")
    return 0


def _described(decision: Decision) -> dict[str, Any]:
    module, rule = decision.module, decision.rule
    return {
        "name": module.name,
        "class": sorted(module.classes),
        "layer": module.layer,
        "rule": None if rule is None else rule.where,
        "device": decision.device,
        "format": list(module.formats),
        "format_is_ruled": rule is not None and rule.format is not None,
        "backend": decision.backend,
        "level": _level(decision),
        "threads": decision.threads or None,
        "host_bytes": module.host_bytes,
    }


def _level(decision: Decision) -> str:
    """ISA level of the CPU kernels in force: the rule's, or the process's."""
    own = ops.isa_choice()[0]
    if decision.backend in ("auto", own):
        return own
    runs = decision.backend in ops.runnable_levels()
    return decision.backend if runs else f"{decision.backend} (cannot run here)"


def _rows(decisions: Sequence[Decision]) -> Iterator[tuple[str, ...]]:
    """Table rows; modules that differ only in their layer share a row, in the order of the first."""
    groups: dict[tuple[str, ...], list[Decision]] = {}
    for decision in decisions:
        module = decision.module
        described = _described(decision)
        formats = "/".join(described["format"]) or "exact"
        key: tuple[str, ...] = (
            re.sub(r"\.layers\.\d+\.", ".layers.*.", module.name),
            ", ".join(described["class"]),
            described["rule"] or "none",
            decision.device,
            formats if described["format_is_ruled"] or formats == "exact" else f"{formats} (file)",
            _level(decision),
            str(described["threads"] or "all"),
        )
        groups.setdefault(key, []).append(decision)
    for key, of_group in groups.items():
        layers = sorted(each.module.layer for each in of_group if each.module.layer is not None)
        num_bytes = sum(each.module.host_bytes for each in of_group)
        yield (key[0].replace("*", ranges(layers, ","), 1), *key[1:], f"{num_bytes / 1e6:.1f}")
