"""What all ranks must have in common, compared before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from twofold import __version__, _core
from twofold.api.config import EngineConfig
from twofold.api.parallel_config import ParallelConfig
from twofold.api.regular_file import read_regular
from twofold.blocks import ops
from twofold.models import ModelFiles

_SAMPLED_TENSORS: Final = 64
_SAMPLE_BYTES: Final = 256


@dataclass(frozen=True)
class Identity:
    """One rank's version, model and settings, as the others see them."""

    version: str
    panels: str
    level: str
    model: str
    settings: str

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Identity:
        """Raises ValueError, TypeError for another version's."""
        data = json.loads(text)
        return Identity(**{name: str(value) for name, value in data.items()})

    def difference(self, other: Identity) -> str:
        """The first difference, as "version 1, rank 0 has 2"; empty: none. `other` is rank 0's."""
        for name, what in _FIELDS.items():
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{what} {mine}, rank 0 has {theirs}"
        return ""


_FIELDS: Final[Mapping[str, str]] = {
    "version": "version",
    "panels": "panel layout",
    "level": "CPU level",
    "model": "model",
    "settings": "settings",
}


def identity_of(config: EngineConfig, parallel: ParallelConfig, files: ModelFiles) -> Identity:
    """This process's identity: all that decides the shares of the ranks and the bits of their products."""
    shared = {
        "--tensor-parallel-size": parallel.tensor_parallel_size,
        "--distributed-backend": parallel.distributed_backend,
        "--enable-expert-parallel": parallel.enable_expert_parallel,
        "--num-redundant-experts": parallel.num_redundant_experts,
        "--tensor-parallel-min-bytes": parallel.tensor_parallel_min_bytes,
        "--speculative-config": config.speculation.mtp_use,
        "--init-expert-location": _digest_of(config.init_expert_location),
    }
    return Identity(
        __version__,
        _core.panel_layout(),
        ops.isa_choice()[0],
        f"of digest {model_digest(files)}",
        ", ".join(f"{flag} {value}" for flag, value in shared.items()),
    )


def model_digest(files: ModelFiles) -> str:
    """Digest of a model's configuration, of its tensors and of samples of their contents: the same for copies of the
    files, whatever their folder is called."""
    digest = blake2b(repr(files.config).encode(), digest_size=8)
    names = sorted(files.tensors)
    for name in names:
        entry = files.tensors.entry(name)
        digest.update(f"{name} {entry.dtype} {entry.shape} {entry.num_bytes}\n".encode())
    for name in names[:: max(1, len(names) // _SAMPLED_TENSORS)]:
        entry = files.tensors.entry(name)
        with entry.file.open("rb") as stream:
            stream.seek(entry.offset + max(0, entry.num_bytes - _SAMPLE_BYTES) // 2)
            digest.update(stream.read(min(_SAMPLE_BYTES, entry.num_bytes)))
    return digest.hexdigest()


def _digest_of(path: str | None) -> str:
    """Digest of a file of statistics; empty without one."""
    if path is None or not Path(path).is_file():
        return ""
    return blake2b(read_regular(Path(path), 1 << 30)[0], digest_size=8).hexdigest()
