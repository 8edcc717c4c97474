"""Checkpoints of a run that are whole or absent, whatever kills it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from twofold.api.errors import TwofoldError

_NAME: Final = re.compile(r"checkpoint-(\d+)")
_PART: Final = ".part"


class CheckpointError(TwofoldError):
    """A checkpoint could not be written; those before it are whole."""


class Checkpoints:
    """The checkpoints in one directory, by their step."""

    def __init__(self, directory: Path, num_kept: int) -> None:
        self.directory, self.num_kept = directory, num_kept

    def path(self, step: int) -> Path:
        return self.directory / f"checkpoint-{step}"

    @property
    def steps(self) -> list[int]:
        """Steps of whole checkpoints, ascending."""
        if not self.directory.is_dir():
            return []
        found = (_NAME.fullmatch(each.name) for each in self.directory.iterdir())
        return sorted(int(match[1]) for match in found if match is not None)

    def remove_parts(self) -> None:
        """Remove what an interrupted run left unfinished."""
        for part in self.directory.glob(f"*{_PART}"):
            shutil.rmtree(part)

    def write(self, step: int, write: Callable[[Path], None], *, best: int | None) -> None:
        """Write a checkpoint with `write`, which gets an empty directory, then remove old ones but `best`.

        Raises CheckpointError if the disk is full or the directory cannot be written.
        """
        part = self.directory / f"{self.path(step).name}{_PART}"
        try:
            part.mkdir(parents=True)
            write(part)
            _synchronise(part)
            os.replace(part, self.path(step))
            _synchronise_entries(self.directory)
        # torch and safetensors have errors of their own for a disk that is full.
        except Exception as error:
            shutil.rmtree(part, ignore_errors=True)
            last = self.steps[-1:]
            remedy = f"the one at step {last[0]} is whole" if last else "there is none before it"
            raise CheckpointError(
                f"{self.path(step)}: cannot be written: {error}; {remedy}. Free some space and run the command again; "
                "it resumes there"
            ) from error
        self._rotate({best} if best is not None else ())

    def _rotate(self, protected: Collection[int]) -> None:
        for step in self.steps[: -self.num_kept]:
            if step not in protected:
                # Renamed first: a directory that is removed half-way is no checkpoint.
                part = self.directory / f"{self.path(step).name}{_PART}"
                os.replace(self.path(step), part)
                shutil.rmtree(part)


def write_adapter(directory: Path, source: Path) -> None:
    """Put the adapter in `source` into `directory`: weights first, so that a reader who finds settings finds both."""
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        part = directory / f".{name}{_PART}"
        shutil.copyfile(source / name, part)
        _synchronise_file(part)
        os.replace(part, directory / name)
    _synchronise_entries(directory)


def _synchronise(directory: Path) -> None:
    """Flush all of a directory to the disk."""
    for file in directory.rglob("*"):
        if file.is_file():
            _synchronise_file(file)
    _synchronise_entries(directory)


def _synchronise_file(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _synchronise_entries(directory: Path) -> None:
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
