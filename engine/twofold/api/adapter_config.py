"""Settings of LoRA adapters: which are served, and how many at once."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from twofold.api.errors import ConfigError
from twofold.api.settings import setting


class LoraModule(NamedTuple):
    """One adapter of `lora_modules`."""

    path: Path
    scale: float = 0.0
    """Scale of its change in requests that name no adapter."""


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA adapters: which are served, and how many at once.

    Raises:
        ConfigError: a value is out of range; the message names the flag.
    """

    lora_modules: tuple[str, ...] = setting(
        (),
        'adapters served as models of their own, each NAME=PATH or {"name": NAME, "path": PATH} (directory of PEFT '
        'or KTransformers, or GGUF file); with "scale": S in the object also applied to requests that name no '
        "adapter",
        several=True,
    )
    max_loras: int = setting(
        8,
        "adapters that the requests of one step may use; with --lora-dir a GPU reserves memory for so many of the "
        "largest rank",
        low=1,
        high=1024,
    )
    max_lora_rank: int = setting(64, "largest rank of an adapter", low=1, high=4096)
    max_cpu_loras: int = setting(
        32,
        "adapters that memory holds; the least recently used one leaves for another and is read again when a request "
        "names it",
        low=1,
        high=4096,
    )
    lora_dir: str | None = setting(
        None,
        "directory that adapters may be loaded from while the server runs (default: only --lora-modules are served)",
    )

    @property
    def loads_adapters(self) -> bool:
        """Whether an adapter may ever be loaded."""
        return bool(self.lora_modules) or self.lora_dir is not None

    @property
    def adapters(self) -> dict[str, LoraModule]:
        """Adapters of `lora_modules` by name. Raises ConfigError for a value of another form or a name given twice."""
        found: dict[str, LoraModule] = {}
        for value in self.lora_modules:
            name, module = _module(value)
            if name in found:
                raise ConfigError(f"--lora-modules: the name {name!r} was given twice")
            found[name] = module
        return found


def _module(value: str) -> tuple[str, LoraModule]:
    scale = 0.0
    if value.lstrip().startswith("{"):
        try:
            given = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"--lora-modules was given {value!r}, which is not JSON: {error}") from None
        name, path, scale = given.get("name"), given.get("path"), given.get("scale", 0.0)
    else:
        name, _, path = value.partition("=")
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise ConfigError(
            f"--lora-modules was given {value!r}; it takes NAME=PATH, once or more, and MODEL comes before it"
        )
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ConfigError(f"--lora-modules was given {value!r}; its scale takes a number")
    return name, LoraModule(Path(path).expanduser(), float(scale))
