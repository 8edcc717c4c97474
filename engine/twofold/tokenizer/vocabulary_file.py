"""Reading the files that some publishers give instead of tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from twofold.api.errors import ModelLoadError
from twofold.weights.json_file import MAX_JSON_BYTES


def read_vocabulary_file(path: Path) -> bytes:
    """The file's bytes. Raises ModelLoadError for one that cannot be read or is larger than any vocabulary."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelLoadError(
                f"{path}: {size} bytes, expected at most {MAX_JSON_BYTES}; download it again"
            )
        return path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
