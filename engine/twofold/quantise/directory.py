"""Output directory of a quantised model: written file by file, so that a killed run resumes.

A file under its final name is complete: it is written as `*.part`, flushed to the disk and renamed.
`quantize-state.json` records the source and target of the run. It exists until config.json, the last file, makes the
directory a model.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from twofold.api.errors import ConfigError, ModelLoadError, TwofoldError
from twofold.api.regular_file import read_regular_text
from twofold.models.derived_model import check_room
from twofold.quantise.recipe import OutputTensor, Recipe
from twofold.weights.block_formats import quantization_config
from twofold.weights.checkpoint import INDEX_FILE, read_header
from twofold.weights.weight_format import source_row_bytes

STATE_FILE: Final = "quantize-state.json"
ProgressFn = Callable[[int, int], None]
"""Receives (bytes done, bytes in all)."""

_DTYPES: Final = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


class OutputDirectory:
    """Output directory of a quantised model. Call `begin` first, `finish` last."""

    def __init__(self, path: Path, recipe: Recipe, source: Path, mark: str) -> None:
        self.path = path
        self._recipe = recipe
        self._source = source
        self._mark = mark
        self._names = [
            f"model-{number:05d}-of-{len(recipe.files):05d}.safetensors"
            for number in range(1, len(recipe.files) + 1)
        ]

    def begin(self) -> bool:
        """Create the directory or resume in it; True if its model is already complete.

        Raises:
            ConfigError: it has other contents, or its disk has too little room.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            found = sorted(entry.name for entry in self.path.iterdir())
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be made or read: {error.strerror}; choose another directory"
            ) from None
        if self.path.resolve() == self._source.resolve():
            raise ConfigError(f"{self.path} is the model itself; choose another directory to write to")
        if self._made_by_this_run("config.json"):
            return True
        if found and not self._made_by_this_run(STATE_FILE):
            raise ConfigError(
                f"{self.path} holds {found[0]} of something else than this run; choose an empty directory or remove it"
            )
        needed = sum(_file_bytes(tensors) for tensors in self._missing().values())
        check_room(self.path, needed)
        self._write_json(STATE_FILE, {"version": 1, "source": str(self._source), "fingerprint": self._mark})
        return False

    def write(self, progress: ProgressFn | None = None) -> int:
        """Write the missing files; returns how many already existed.

        Raises:
            TwofoldError: the disk is full or fails; another run resumes.
            ModelLoadError: the source is damaged.
        """
        missing = self._missing()
        total = sum(tensor.num_bytes for tensor in self._recipe.tensors())
        done = total - sum(tensor.num_bytes for tensors in missing.values() for tensor in tensors)
        for name, tensors in missing.items():
            with self._disk_errors(done, total):
                for written in _write_safetensors(self.path / name, tensors):
                    done += written
                    if progress is not None:
                        progress(done, total)
            self._recipe.release(self._names.index(name))
        return len(self._names) - len(missing)

    def finish(self, config: Mapping[str, Any], write_tokenizer: Callable[[], None]) -> None:
        """Write the tokenizer's files, the index and, last, config.json, which completes the model."""
        total = sum(tensor.num_bytes for tensor in self._recipe.tensors())
        with self._disk_errors(total, total):
            write_tokenizer()
            weight_map = {
                tensor.name: name
                for name, tensors in zip(self._names, self._recipe.files, strict=True)
                for tensor in tensors
            }
            self._write_json(INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
            section = quantization_config(self._recipe.formats(), self._mark)
            self._write_json("config.json", {**config, "quantization_config": section})
            (self.path / STATE_FILE).unlink(missing_ok=True)

    def _missing(self) -> dict[str, tuple[OutputTensor, ...]]:
        """The files that are missing or incorrect."""
        return {
            name: tensors
            for name, tensors in zip(self._names, self._recipe.files, strict=True)
            if not _is_whole(self.path / name, tensors)
        }

    def _made_by_this_run(self, name: str) -> bool:
        try:
            data = json.loads(read_regular_text(self.path / name))
        except (OSError, ValueError):
            return False
        section = data.get("quantization_config", data) if isinstance(data, dict) else None
        return isinstance(section, dict) and section.get("fingerprint") == self._mark

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        part = self.path / f"{name}.part"
        with part.open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(value, indent=2) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(self.path / name)

    @contextmanager
    def _disk_errors(self, done: int, total: int) -> Iterator[None]:
        """Converts an OSError of the output's disk to a message that another run resumes."""
        written = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB are written and kept"
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise TwofoldError(
                    f"{self.path}: the disk is full; {written}: free some space and run the same command again"
                ) from error
            raise TwofoldError(
                f"{self.path}: cannot be written: {error.strerror}; {written}: run the same command again"
            ) from error


def _stored(tensor: OutputTensor) -> tuple[str, tuple[int, ...]]:
    """(safetensors dtype, shape) of a stored tensor."""
    if not tensor.is_quantised:
        return _DTYPES[tensor.format], tensor.shape
    return "U8", (*tensor.shape[:-1], source_row_bytes(tensor.format, tensor.shape[-1]))


def _header(tensors: tuple[OutputTensor, ...]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        dtype, shape = _stored(tensor)
        end = offset + tensor.num_bytes
        header[tensor.name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    return len(text).to_bytes(8, "little") + text


def _file_bytes(tensors: tuple[OutputTensor, ...]) -> int:
    return len(_header(tensors)) + sum(tensor.num_bytes for tensor in tensors)


def _write_safetensors(path: Path, tensors: tuple[OutputTensor, ...]) -> Any:
    """Write one file, yielding the bytes of weights written after each piece."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as stream:
        stream.write(_header(tensors))
        for tensor in tensors:
            written = 0
            for piece in tensor.pieces():
                stream.write(piece)
                written += len(piece)
                yield len(piece)
            if written != tensor.num_bytes:
                raise ModelLoadError(
                    f"{path}: tensor {tensor.name} came out as {written} bytes, expected {tensor.num_bytes}; the "
                    "source changed while it was read, run the same command again"
                )
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(path)


def _is_whole(path: Path, tensors: tuple[OutputTensor, ...]) -> bool:
    try:
        entries = read_header(path)
    except ModelLoadError:
        return False
    found = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    return found == {tensor.name: _stored(tensor) for tensor in tensors}
