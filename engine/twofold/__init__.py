"""Twofold: hybrid CPU+GPU inference for Mixture-of-Experts models, every decision priced and on show."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    __version__ = version("twofold")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"


def _modules_of_the_source_tree() -> list[str]:
    """Where a source tree's native modules lie: in the build directory, so that a host and a container that share the
    checkout keep one each (TWOFOLD_BUILD_DIR, scripts/build_steps.sh). A wheel holds its own
    beside this file.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "scripts/build_steps.sh").is_file():
        return []
    return [str(Path(os.environ.get("TWOFOLD_BUILD_DIR") or root / "build") / "dev/modules")]


__path__ = _modules_of_the_source_tree() + __path__
