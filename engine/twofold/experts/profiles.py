"""Machine profiles: the figures of the cost model for one machine, each with its source.

A profile is a JSON file `{"format", "version", "name", "description", "figures": {name: {"value", "source"}}}`. Shipped
ones describe common machines, so that they can be emulated where they are not; units are in the names of the figures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from twofold.errors import ConfigError

FORMAT: Final = "twofold-machine-profile"
VERSION: Final = 1

# What the native cost model takes; a profile may say more about its machine (INFORMATIVE).
COST_FIGURES: Final = (
    "handover_us",
    "cpu_bandwidth_gbps",
    "cpu_gflops",
    "cpu_expert_overhead_us",
    "gpu_launch_us",
    "vram_bandwidth_gbps",
    "gpu_gflops",
    "link_latency_us",
    "link_bandwidth_gbps",
    "contention",
    "join_us",
)
INFORMATIVE: Final = ("vram_gb",)


@dataclass(frozen=True)
class Figure:
    value: float
    source: str


@dataclass(frozen=True)
class MachineProfile:
    """The figures of one machine. `cost_figures` is what the native cost model is built from."""

    name: str
    description: str
    figures: Mapping[str, Figure]

    @property
    def cost_figures(self) -> dict[str, float]:
        return {name: self.figures[name].value for name in COST_FIGURES}


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles that come with the package."""
    folder = resources.files("twofold.experts") / "profiles"
    return tuple(sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")))


def load_profile(name_or_path: str) -> MachineProfile:
    """A shipped profile by name, or one from a JSON file.

    Raises:
        ConfigError: no such profile (the message lists the shipped ones), or a figure is missing or impossible.
    """
    if name_or_path in shipped_profiles():
        text = (resources.files("twofold.experts") / "profiles" / f"{name_or_path}.json").read_text("utf-8")
    elif name_or_path.endswith(".json"):
        try:
            text = Path(name_or_path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"machine profile {name_or_path}: {error}; give a readable JSON file"
            ) from error
    else:
        raise ConfigError(
            f"machine profile {name_or_path!r} is unknown; expected one of {', '.join(shipped_profiles())} "
            "or the path of a .json file"
        )
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"machine profile {name_or_path}: not JSON ({error}); write it anew") from error
    return parse_profile(content, where=f"machine profile {name_or_path}")


def parse_profile(content: Any, *, where: str) -> MachineProfile:
    """Check a parsed profile. Raises ConfigError that names `where`, the figure and what was expected."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(f'{where}: not a machine profile, expected "format": "{FORMAT}"')
    if content.get("version") != VERSION:
        raise ConfigError(
            f"{where}: version {content.get('version')!r}, this Twofold reads version {VERSION}"
        )
    given = content.get("figures")
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: 'figures' is missing or no object")
    missing = [name for name in COST_FIGURES if name not in given]
    unknown = [name for name in given if name not in COST_FIGURES + INFORMATIVE]
    if missing or unknown:
        problem = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
        raise ConfigError(f"{where}: {problem}; expected exactly {', '.join(COST_FIGURES)}")
    figures = {name: _parse_figure(given[name], f"{where}: {name}") for name in given}
    return MachineProfile(str(content.get("name", "unnamed")), str(content.get("description", "")), figures)


def _parse_figure(given: Any, where: str) -> Figure:
    if not isinstance(given, dict) or not isinstance(given.get("source"), str):
        raise ConfigError(f'{where} is {given!r}, expected {{"value": number, "source": text}}')
    value = given.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{where} is {value!r}, expected a finite number that is not negative")
    if value == 0 and where.endswith(("gbps", "gflops", "gb")):
        raise ConfigError(f"{where} is 0, expected more: a rate of nothing never finishes")
    return Figure(float(value), given["source"])
