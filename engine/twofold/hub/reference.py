"""Names of models on a hub: `org/repo`, `org/repo:QUANT`, `org/repo@REVISION`, each also after `hf:`."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twofold.api.errors import ConfigError

EXPECTED: Final = "hf:ORG/REPO, hf:ORG/REPO:QUANT or hf:ORG/REPO@REVISION"
_PREFIX: Final = "hf:"
_PART: Final = r"[A-Za-z0-9][\w.-]*"
_NAME: Final = re.compile(rf"(?P<repo>{_PART}/{_PART})(?::(?P<quant>[\w./-]+))?(?:@(?P<revision>[\w./-]+))?")
_DEFAULT_REVISION: Final = "main"


@dataclass(frozen=True)
class HubModel:
    """A model on a hub."""

    repo: str
    """`org/repo`."""
    quant: str | None = None
    """Quantisation or file name of a GGUF; None: safetensors weights if there are any, else the usual quantisation."""
    revision: str = _DEFAULT_REVISION
    """Branch, tag or commit."""

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


def parse_hub_name(text: str, revision: str | None = None) -> HubModel | None:
    """The model that `text` names on a hub; None if it is a path.

    Without the prefix `hf:` an existing path comes first, and a name in an existing directory is a path.

    Args:
        revision: overrides the default revision.

    Raises:
        ConfigError: a malformed name after `hf:`, or two different revisions.
    """
    is_marked = text.startswith(_PREFIX)
    match = _NAME.fullmatch(text.removeprefix(_PREFIX))
    if match is None:
        if is_marked:
            raise ConfigError(f"the model name {text!r} was given; expected {EXPECTED}")
        return None
    if not is_marked and (_is_path(text) or text.lower().endswith(".gguf")):
        return None
    if revision and match["revision"] and revision != match["revision"]:
        raise ConfigError(
            f"the model {text!r} and --revision {revision} name different revisions; give one of them"
        )
    model = HubModel(match["repo"], match["quant"])
    return dataclasses.replace(model, revision=revision or match["revision"] or _DEFAULT_REVISION)


def _is_path(text: str) -> bool:
    path = Path(text)
    return path.exists() or path.parent.exists()
