"""Files are read through `twofold.api.regular_file`: a pipe in place of a file would block the process for ever."""

from __future__ import annotations

import ast
from pathlib import Path

ENGINE = Path(__file__).resolve().parents[2] / "engine" / "twofold"
OWN = {
    # Files of the kernel.
    "experts/machine_facts.py",
    "parallel/place.py",
    "server/admin/process_metrics.py",
    "telemetry/machine_samples.py",
    "tools/cli/doctor/gpu_report.py",
    "tools/cli/serve/orphans.py",
    "weights/host_memory.py",
    # Files of the package.
    "experts/profiles.py",
    "quantise/texts.py",
    "rules/placement.py",
    # Files that this process, or one that it started, has just written.
    "device/backend.py",
    "experts/moe.py",
    "tools/loadgen/server_process.py",
}
"""Modules whose files no user names."""
READS = ("read_text", "read_bytes")


def readers(source: str) -> list[int]:
    """Lines that read a file by a method of its path."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS
    ]


def test_every_file_that_a_user_names_is_read_with_a_check() -> None:
    found = {
        str(path.relative_to(ENGINE)): lines
        for path in sorted(ENGINE.rglob("*.py"))
        if (lines := readers(path.read_text()))
    }
    assert {name: found[name] for name in found if name not in OWN} == {}
    assert set(found) >= OWN, "a name that is no longer needed"


def test_the_search_finds_readers() -> None:
    assert readers("text = path.read_text('utf-8')\nread_text(path)\ndata = Path('a').read_bytes()") == [1, 3]
