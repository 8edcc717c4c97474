"""Machine profiles: the figures of the cost model for one machine, each with its source.

A profile is a JSON file `{"format", "version", "name", "description", "figures": {name: {"value", "source"}}}`. Shipped
ones describe common machines for emulation; units are in the names of the figures. Profiles written by
`twofold calibrate` also have `"cpu_curves"`: measured times of CPU experts by shape, not linear in tokens.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, TypeGuard

from twofold import _core
from twofold.api.errors import ConfigError
from twofold.api.regular_file import read_regular_text

FORMAT: Final = "twofold-machine-profile"
VERSION: Final = 2

# Figures that the native cost model requires; a profile may have more (INFORMATIVE).
COST_FIGURES: Final = (
    "handshake_us",
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
HOST_FIGURES: Final = ("cpu_bandwidth_gbps", "cpu_gflops", "cpu_expert_overhead_us")
"""Figures of the host; the others are those of a device and its link."""
MOST_DEVICES: Final = 8
UNCALIBRATED: Final = "h200-pcie5"
"""Profile of a machine that was not calibrated."""


@dataclass(frozen=True)
class Figure:
    value: float
    source: str


@dataclass(frozen=True)
class CpuCurve:
    """Measured time of the CPU's experts of one shape: a layer takes `layer_us` + the sum of its experts' points."""

    format: str
    """Weight format: `MoeShape.format`."""
    hidden: int
    intermediate: int
    threads: int
    layer_us: float
    """Fixed cost of a layer: handing work to the pool and joining it."""
    points: tuple[tuple[int, float], ...]
    """(tokens of one expert, microseconds), tokens ascending; linear in between."""

    @property
    def experts(self) -> tuple[str, int, int, int]:
        """Measured experts: (format, hidden, intermediate, threads)."""
        return self.format, self.hidden, self.intermediate, self.threads


@dataclass(frozen=True)
class MachineProfile:
    """The figures of one machine. `cost_figures` is what the native cost model is built from."""

    name: str
    description: str
    figures: Mapping[str, Figure]
    cpu_curves: tuple[CpuCurve, ...] = ()
    joined: tuple[MachineProfile, ...] = ()
    """This host with each device alone, where there are several; empty: there is one."""

    @property
    def devices(self) -> tuple[MachineProfile, ...]:
        """For each device, this host with that device alone."""
        return self.joined or (self,)

    def native(self) -> _core.MachineProfile:
        """The same for the native cost model."""
        first, *others = (
            _core.MachineProfile.from_fields(device.name, device.cost_figures) for device in self.devices
        )
        return first.with_devices(others) if others else first

    def cpu_curve(self, format: str, hidden: int, intermediate: int, threads: int) -> CpuCurve | None:
        """The curve measured for exactly this shape and number of threads; None if missing."""
        wanted = (format, hidden, intermediate, threads)
        return next((curve for curve in self.cpu_curves if curve.experts == wanted), None)

    def to_json(self) -> str:
        """The profile as JSON text."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "description": self.description,
            "figures": {name: dataclasses.asdict(figure) for name, figure in self.figures.items()},
            "cpu_curves": [dataclasses.asdict(curve) for curve in self.cpu_curves],
        }
        return json.dumps(content, indent=2) + "\n"

    @property
    def cost_figures(self) -> dict[str, float]:
        return {name: self.figures[name].value for name in COST_FIGURES}


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles shipped with the package."""
    folder = resources.files("twofold.experts") / "profiles"
    return tuple(sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")))


def load_profile(name_or_path: str) -> MachineProfile:
    """A shipped profile by name, or one from a JSON file; several joined by "+": one machine with all their devices.

    The host of several is the first one's.

    Raises:
        ConfigError: unknown profile (the message lists the shipped ones), or a figure is missing or impossible.
    """
    if "+" in name_or_path and not Path(name_or_path).is_file():
        return join_profiles([load_profile(name) for name in name_or_path.split("+")])
    if name_or_path in shipped_profiles():
        text = (resources.files("twofold.experts") / "profiles" / f"{name_or_path}.json").read_text("utf-8")
    elif name_or_path.endswith(".json"):
        try:
            text = read_regular_text(Path(name_or_path))
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
        raise ConfigError(
            f"machine profile {name_or_path}: not JSON ({error}); fix it or run `twofold calibrate`"
        ) from error
    return parse_profile(content, where=f"machine profile {name_or_path}")


def join_profiles(profiles: Sequence[MachineProfile], *, sorts: bool = True) -> MachineProfile:
    """One machine with the devices of all these. Its host is that of the first profile.

    sorts: fastest memory first, because the first device computes all work outside the experts.

    Raises:
        ConfigError: too many devices.
    """
    if len(profiles) > MOST_DEVICES:
        raise ConfigError(f"{len(profiles)} devices were given; at most {MOST_DEVICES} are supported")
    host = {name: profiles[0].figures[name] for name in HOST_FIGURES}
    devices = [
        dataclasses.replace(
            profile, figures={**profile.figures, **host}, cpu_curves=profiles[0].cpu_curves, joined=()
        )
        for profile in profiles
    ]
    if sorts:
        devices.sort(key=lambda device: -device.figures["vram_bandwidth_gbps"].value)
    return dataclasses.replace(
        devices[0],
        name="+".join(device.name for device in devices),
        description=" and ".join(device.description for device in devices),
        joined=tuple(devices),
    )


def parse_profile(content: Any, *, where: str) -> MachineProfile:
    """Check a parsed profile. Raises ConfigError that names `where`, the figure and what was expected."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(f'{where}: not a machine profile, expected "format": "{FORMAT}"')
    if content.get("version") != VERSION:
        raise ConfigError(
            f"{where}: version {content.get('version')!r}, this Twofold reads version {VERSION}; "
            "run `twofold calibrate` to measure again"
        )
    given = content.get("figures")
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: 'figures' is missing or not an object")
    missing = [name for name in COST_FIGURES if name not in given]
    unknown = [name for name in given if name not in COST_FIGURES + INFORMATIVE]
    if missing or unknown:
        problem = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
        raise ConfigError(f"{where}: {problem}; expected exactly {', '.join(COST_FIGURES)}")
    figures = {name: _parse_figure(given[name], f"{where}: {name}") for name in given}
    curves = content.get("cpu_curves", [])
    if not isinstance(curves, list):
        raise ConfigError(f"{where}: 'cpu_curves' is {type(curves).__name__}, expected a list")
    return MachineProfile(
        str(content.get("name", "unnamed")),
        str(content.get("description", "")),
        figures,
        # A curve with a "dtype" predates formats; its kernels are obsolete.
        tuple(
            _parse_curve(curve, f"{where}: cpu_curves[{i}]")
            for i, curve in enumerate(curves)
            if not (isinstance(curve, dict) and "dtype" in curve)
        ),
    )


def load_machine_profile(name_or_path: str | None) -> MachineProfile | None:
    """This machine's profile: the named one, else that of `twofold calibrate`, else None. Several joined by "+" are
    those of its devices, in order. Raises ConfigError."""
    if name_or_path and "+" in name_or_path and not Path(name_or_path).is_file():
        return join_profiles([load_profile(name) for name in name_or_path.split("+")], sorts=False)
    if name_or_path:
        return load_profile(name_or_path)
    path = local_profile_path()
    return load_profile(str(path)) if path.is_file() else None


def profile_of_devices(machine: MachineProfile | None, names: Sequence[str]) -> MachineProfile:
    """The profile of a machine with these devices. A profile of one device describes each of them.

    machine: the result of calibration; None: UNCALIBRATED's figures.

    Raises:
        ConfigError: the profile has another number of devices.
    """
    profile = machine or load_profile(UNCALIBRATED)
    if len(names) <= 1 or len(profile.devices) == len(names):
        return profile
    if profile.joined:
        raise ConfigError(
            f"--machine-profile {profile.name} has {len(profile.devices)} devices; {len(names)} are used "
            f"({', '.join(names)}): give one profile for each, joined by +, in this order"
        )
    return join_profiles([profile] * len(names), sorts=False)


def local_profile_path() -> Path:
    """Default file of this machine's profile, written by `twofold calibrate`."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "twofold" / "machine.json"


def _parse_curve(given: Any, where: str) -> CpuCurve:
    fields = {field.name for field in dataclasses.fields(CpuCurve)}
    if not isinstance(given, dict) or set(given) != fields:
        raise ConfigError(f"{where} must be an object of exactly {', '.join(sorted(fields))}")
    points = given["points"]
    numbers = (
        [given["layer_us"], *(v for point in points for v in point)] if _is_pairs(points) else [math.nan]
    )
    sizes = [given["hidden"], given["intermediate"], given["threads"]]
    if not all(_is_number(n) and n >= 0 for n in numbers) or not all(type(n) is int and n > 0 for n in sizes):
        raise ConfigError(f"{where} holds a figure that is missing, negative or not finite; calibrate again")
    tokens = [point[0] for point in points]
    if not tokens or tokens != sorted(set(tokens)) or tokens[0] < 1 or min(us for _, us in points) <= 0:
        raise ConfigError(f"{where}: points must have ascending tokens and times above 0; calibrate again")
    parsed = tuple((int(n), float(us)) for n, us in points)
    hidden, intermediate, threads = sizes
    return CpuCurve(
        str(given["format"]), hidden, intermediate, threads, layer_us=float(given["layer_us"]), points=parsed
    )


def _is_pairs(points: Any) -> bool:
    return isinstance(points, list) and all(isinstance(p, list | tuple) and len(p) == 2 for p in points)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _parse_figure(given: Any, where: str) -> Figure:
    if not isinstance(given, dict) or not isinstance(given.get("source"), str):
        raise ConfigError(f'{where} is {given!r}, expected {{"value": number, "source": text}}')
    value = given.get("value")
    if not _is_number(value) or value < 0:
        raise ConfigError(f"{where} is {value!r}, expected a finite number that is not negative")
    if value == 0 and where.endswith(("gbps", "gflops", "gb")):
        raise ConfigError(f"{where} is 0, expected a rate above 0")
    return Figure(float(value), given["source"])
