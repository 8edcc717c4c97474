"""Reader for untrusted npz files: no pickles, and a one-line error for every invalid file."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ConfigError
from twofold.api.regular_file import open_regular

_MAX_BYTES: Final = 8 << 30
"""Bytes of all arrays, which are compressed in the file: a trace of ten million tokens has less."""


def read_arrays(
    path: Path, names: Sequence[str], expected: str, *, needs: str | None = None
) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an npz file with one of these `names`.

    Args:
        expected: description of the expected file, for messages.
        needs: name of a required array.

    Raises:
        ConfigError: not an npz file, a damaged one, or one without `needs`.
        OSError: the file is missing or cannot be read.
    """
    with open_regular(path) as file:
        # Other files reach numpy's pickle reader, whose message recommends allowing pickles.
        if not zipfile.is_zipfile(file):
            raise ConfigError(f"{path}: cannot be read: truncated or not an npz file; {expected}")
        file.seek(0)
        try:
            with np.load(file, allow_pickle=False) as archive:
                if sum(each.file_size for each in archive.zip.infolist()) > _MAX_BYTES:
                    raise ConfigError(f"{path}: its arrays have more than {_MAX_BYTES} bytes; {expected}")
                if needs is not None and needs not in archive.files:
                    raise ConfigError(
                        f"{path}: holds {', '.join(archive.files)[:200] or 'nothing'}; {expected}"
                    )
                return {name: np.asarray(archive[name]) for name in names if name in archive.files}
        except (EOFError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error):
            raise ConfigError(
                f"{path}: cannot be read: damaged, or its arrays hold Python objects; {expected}"
            ) from None
