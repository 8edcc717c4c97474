"""Functions are short and shallow.

Not by ruff: it counts statements (PLR0915) and branches (C901, PLR0912), not lines, so a call or table of a hundred
lines counts as one; it counts nesting (PLR1702) only in its preview.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("engine", "dashboard", "loadtest", "benchmarks", "models", "scripts")

MAX_LINES = 60
MAX_NESTING = 4
"""Statements within one another that hold statements; an elif and a function within a function begin none."""

EXCEPTIONS = {
    "engine/twofold/device/loading.py: load_on_device",
    "engine/twofold/device/table_layers.py: __init__",
    "engine/twofold/engine/loading.py: load_parts",
    "engine/twofold/server/admin/routes.py: router",
    "engine/twofold/server/admin/status.py: _engine_gauges",
    "engine/twofold/server/admin/status.py: router",
    "engine/twofold/server/bridge/models/crossing.py: submit",
    "engine/twofold/server/ollama/routes.py: router",
    "engine/twofold/text/chat/dialects/harmony.py: read_answer",
    "engine/twofold/text/tokenizer/chat_template.py: render",
}
"""Functions beyond a limit. None may be added; remove those that have become short."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NESTING = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.AsyncFor, ast.AsyncWith)


def nesting(node: ast.AST, depth: int = 0) -> int:
    """The deepest nesting of statements in `node`, which is at `depth`."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        begins = isinstance(child, _NESTING) and not is_elif
        deepest = max(deepest, nesting(child, depth + begins))
    return deepest


def beyond_limits(source: str) -> Iterator[str]:
    """Names of the functions that are too long or too deep."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _FUNCTIONS):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno >= MAX_LINES or nesting(node) > MAX_NESTING:
                yield node.name


def test_functions_stay_short_and_shallow() -> None:
    found = {
        f"{path.relative_to(ROOT).as_posix()}: {name}"
        for top in TOPS
        for path in (ROOT / top).rglob("*.py")
        for name in beyond_limits(path.read_text(encoding="utf-8"))
    }
    assert found - EXCEPTIONS == set()


def test_a_long_and_a_deep_function_are_found() -> None:
    long = "def long():\n" + "    pass\n" * MAX_LINES
    lines = [f"{'    ' * depth}if x:\n" for depth in range(1, MAX_NESTING + 2)]
    deep = "def deep():\n" + "".join(lines) + "    " * (MAX_NESTING + 2) + "pass\n"
    chain = "def chain():\n    if x:\n        pass\n" + "    elif x:\n        pass\n" * 9
    assert list(beyond_limits(long + deep + chain)) == ["long", "deep"]
