"""Settings of a server with several models."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from twofold.api.errors import ConfigError
from twofold.api.settings import Checked, check, setting

_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION: Final = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)")


@dataclass(frozen=True)
class ModelsConfig(Checked):
    """Several models: loaded by the first request that names them, unloaded when another one needs the memory.

    Raises:
        ConfigError: a value is out of range.
    """

    models: tuple[str, ...] = setting(
        (),
        "further models, each as MODEL; with one or more of them, requests choose by their `model` field",
        positional=True,
    )
    models_dir: str | None = setting(
        None, "directory whose models (directories and GGUF files, two levels deep) are served"
    )
    models_max: int | None = setting(
        None,
        "models loaded at the same time; 0 = no limit but memory (default: 4 on a CPU, 1 with an accelerator, whose "
        "memory one model fills)",
        low=0,
        high=1000,
        also="OLLAMA_MAX_LOADED_MODELS",
    )
    models_memory_bytes: int | None = setting(
        None,
        "host memory in bytes for all loaded models: weights, KV caches and snapshots (default: what is free at the "
        "start, less 512 MiB)",
        low=2**20,
    )
    keep_alive: str = setting(
        "-1",
        "how long an idle model stays loaded while no other one needs its memory: seconds, or a duration such as 5m; "
        "-1 = for ever, 0 = unload after each request; Ollama's `keep_alive` field overrides it",
        also="OLLAMA_KEEP_ALIVE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check(parsed_keep_alive(self.keep_alive) is not None, "keep_alive", self.keep_alive, KEEP_ALIVE_FORM)

    @property
    def is_used(self) -> bool:
        """Whether the server has several models."""
        return bool(self.models) or self.models_dir is not None

    @property
    def keep_alive_s(self) -> float:
        """Seconds; inf: for ever."""
        found = parsed_keep_alive(self.keep_alive)
        if found is None:
            raise ConfigError(f"--keep-alive was given {self.keep_alive!r}; it takes {KEEP_ALIVE_FORM}")
        return found


KEEP_ALIVE_FORM: Final = "a number of seconds, a duration such as 5m or 1h30m, or a negative one for ever"


def parsed_keep_alive(given: float | str) -> float | None:
    """Ollama's `keep_alive` in seconds; inf for a negative one, None for a malformed one."""
    if isinstance(given, str):
        sign, text = ("-", given[1:]) if given.startswith("-") else ("", given)
        try:
            seconds = float(sign + text)
        except ValueError:
            parts = _DURATION.findall(text)
            if not parts or "".join(number + unit for number, unit in parts) != text:
                return None
            seconds = sum(float(number) * _UNITS[unit] for number, unit in parts) * (-1 if sign else 1)
    else:
        seconds = float(given)
    if math.isnan(seconds):
        return None
    return math.inf if seconds < 0 else seconds
