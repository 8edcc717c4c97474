"""Reads untrusted model files with a size limit."""

from __future__ import annotations

from pathlib import Path

from twofold.api.errors import ModelLoadError
from twofold.api.regular_file import read_regular
from twofold.weights.json_file import MAX_JSON_BYTES


def read_bounded_bytes(path: Path) -> bytes:
    """The file's bytes. Raises ModelLoadError if it cannot be read or exceeds any vocabulary's size."""
    try:
        return _read(path, MAX_JSON_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from None


def read_bounded_text(path: Path, limit: int = MAX_JSON_BYTES, *, if_missing: str | None = None) -> str:
    """The same for UTF-8 text of at most `limit` bytes; `if_missing` is the message if there is no such file."""
    try:
        return _read(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path}: not UTF-8 text at byte {error.start}; download it again") from None
    except OSError as error:
        if if_missing is not None and isinstance(error, FileNotFoundError):
            raise ModelLoadError(f"{path}: {if_missing}") from None
        raise _unreadable(path, error) from None


def _read(path: Path, limit: int) -> bytes:
    raw, size = read_regular(path, limit)
    if size > limit:
        raise ModelLoadError(f"{path}: {size} bytes, expected at most {limit}; download it again")
    return raw


def _unreadable(path: Path, error: OSError) -> ModelLoadError:
    return ModelLoadError(f"{path}: cannot be read: {error.strerror}")
