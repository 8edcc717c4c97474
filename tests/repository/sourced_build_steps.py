"""Runs parts of scripts/build_steps.sh by themselves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def sourced(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `command` in a Bash that has sourced the build steps."""
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail; source scripts/build_steps.sh; {command}"],
        cwd=ROOT,
        env=dict(os.environ, **environment),
        capture_output=True,
        text=True,
        check=False,
    )
