"""Writes the stubs of the native modules: `python -m scripts.stubs`.

Names, defaults and most types come from the compiled modules. `refined/` has what their signatures cannot say: classes
that take keywords, element types of plain arrays, keys of dictionaries, and longer docstrings. It begins with what only
the stub knows, and names only the parameters whose types it refines. A test compares the stubs with what this program
would write.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scripts.stubs import signatures

PACKAGE: Final = Path(__file__).resolve().parents[2] / "engine/twofold"
REFINED: Final = Path(__file__).resolve().parent / "refined"
STUBS: Final = {"_core": "_core/__init__.pyi", "_core.device": "_core/device.pyi", "_cuda": "_cuda.pyi"}
"""The stub of each native module."""
NOT_SHOWN: Final = ("__buffer__",)
"""Members that Python 3.11 does not show."""
_Scope = ast.Module | ast.ClassDef


class StaleError(Exception):
    """A refinement of something that the module does not have."""


def stub(name: str) -> str:
    """The whole text of a module's stub. ImportError where this build lacks the module; StaleError."""
    native = importlib.import_module(f"twofold.{name.removesuffix('.device')}")
    native = native.device if name.endswith(".device") else native
    text = (REFINED / f"{name.removeprefix('_')}.pyi").read_text(encoding="utf-8")
    refinements = ast.parse(text).body
    begin = min(node.lineno for node in refinements if _name(node) in vars(native))
    further = ast.Module([node for node in refinements if node.lineno >= begin], [])
    reported = ast.Module(list(signatures.definitions(native)), [])
    reported.body = refined_members(reported, further, native.__name__)
    return formatted(
        "\n".join([*text.splitlines()[: begin - 1], ast.unparse(ast.fix_missing_locations(reported))])
    )


def refined_members(reported: _Scope, refined: _Scope, where: str) -> list[Any]:
    """What a module or class has, with the types and docstrings of its refinement. StaleError."""
    own = ast.get_docstring(reported)
    doc = signatures.documented(ast.get_docstring(refined) or own or "")
    further: dict[str | None, Any] = {_name(node): node for node in refined.body if _name(node)}
    members = [
        _refined(node, further.pop(_name(node), None), where)
        for node in (reported.body[1:] if own else reported.body)
    ]
    if unknown := further.keys() - set(NOT_SHOWN):
        raise StaleError(f"{where} has no {', '.join(map(str, unknown))}")
    return [*doc, *further.values(), *members]


def formatted(source: str) -> str:
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "stub.pyi", "-"]
    root = PACKAGE.parents[1]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True, cwd=root).stdout


def _name(node: ast.AST) -> str | None:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return getattr(node, "name", None)


def _refined(reported: Any, refined: Any, where: str) -> Any:
    if refined is None:
        return reported
    where = f"{where}.{_name(reported)}"
    if type(reported) is not type(refined):
        raise StaleError(f"{where} is another kind of thing than its refinement")
    if isinstance(reported, ast.AnnAssign):
        reported.annotation = refined.annotation
    elif isinstance(reported, ast.FunctionDef):
        _refine_function(reported, refined, where)
    else:
        reported.body = refined_members(reported, refined, where)
    return reported


def _refine_function(reported: ast.FunctionDef, refined: ast.FunctionDef, where: str) -> None:
    if reported.args.kwarg is not None:  # the module reads keywords by itself
        reported.args = refined.args
    else:
        kinds = {each.arg: each.annotation for each in _parameters(refined)}
        for each in _parameters(reported):
            each.annotation = kinds.pop(each.arg, None) or each.annotation
        if kinds:
            raise StaleError(f"{where} has no {', '.join(kinds)}")
    reported.returns = refined.returns or reported.returns
    reported.body = signatures.documented(ast.get_docstring(refined) or "") or reported.body


def _parameters(function: ast.FunctionDef) -> Sequence[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def main() -> int:
    for name, path in STUBS.items():
        (PACKAGE / path).write_text(stub(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
