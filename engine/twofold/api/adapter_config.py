"""Settings of LoRA adapters: which are served, and how many at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from twofold.api.errors import ConfigError
from twofold.api.settings import setting


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA adapters: which are served, and how many at once.

    Raises:
        ConfigError: a value is out of range; the message names the flag.
    """

    lora_modules: tuple[str, ...] = setting(
        (),
        'adapter served as a model of its own, NAME=PATH or {"name": NAME, "path": PATH} (directory of PEFT '
        "or KTransformers, or GGUF file); again for more",
    )
    max_loras: int = setting(8, "adapters that the requests of one step may use", low=1, high=1024)
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
    def adapters(self) -> dict[str, Path]:
        """Paths of `lora_modules` by name. Raises ConfigError for a value of another form or a name given twice."""
        found: dict[str, Path] = {}
        for value in self.lora_modules:
            name, path = _name_and_path(value)
            if name in found:
                raise ConfigError(f"--lora-modules: the name {name!r} was given twice")
            found[name] = Path(path).expanduser()
        return found


def _name_and_path(value: str) -> tuple[str, str]:
    if value.lstrip().startswith("{"):
        try:
            given = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"--lora-modules was given {value!r}, which is not JSON: {error}") from None
        name, path = given.get("name"), given.get("path")
    else:
        name, _, path = value.partition("=")
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise ConfigError(f"--lora-modules was given {value!r}; it takes NAME=PATH")
    return name, path
