"""The stubs of the native modules name what the modules export, no more and no less."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import ModuleType

import pytest
from twofold import _core

PACKAGE = Path(__file__).resolve().parents[2] / "engine/twofold"


def submodules(module: ModuleType, below: str = "") -> dict[str, ModuleType]:
    """Every module below `module`, by its path there."""
    found = {}
    for name, value in sorted(vars(module).items()):
        if inspect.ismodule(value):
            found |= {f"{below}{name}": value} | submodules(value, f"{below}{name}/")
    return found


SUBMODULES = submodules(_core)


def stubbed(stub: Path) -> dict[str, set[str]]:
    """Public names of a stub, with the members of those that are classes; types that only a stub knows are left out."""
    names: dict[str, set[str]] = {}
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names[node.name] = set()
        elif isinstance(node, ast.ClassDef):
            typed = any(isinstance(base, ast.Name) and base.id == "TypedDict" for base in node.bases)
            if typed or node.name.startswith("_"):
                continue
            members = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            members |= {
                part.target.id
                for part in node.body
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
            }
            names[node.name] = members - {"__buffer__"}  # which Python 3.11 does not show
    return names


def exported(module: ModuleType) -> dict[str, set[str]]:
    """Public names of a native module, with the members of those that are classes."""
    names: dict[str, set[str]] = {}
    for name, value in vars(module).items():
        if name.startswith("_") or inspect.ismodule(value):
            continue
        names[name] = members_of(value) if inspect.isclass(value) else set()
    return names


def members_of(native: type) -> set[str]:
    """Members that a class adds to its base; __init__ where Python may call it (not for enumerations)."""
    found = {name for name in vars(native) if not name.startswith("_")} | {"__len__"} & set(vars(native))
    made_here = "__init__" in vars(native) and not str(native.__init__.__doc__).startswith("Initialize self")
    return found | {"__init__"} if made_here and not hasattr(native, "__members__") else found


@pytest.mark.parametrize("path", SUBMODULES)
def test_every_submodule_has_a_stub_that_names_what_it_exports(path: str) -> None:
    folder = PACKAGE / "_core" / path
    stub = folder / "__init__.pyi" if folder.is_dir() else folder.with_suffix(".pyi")
    assert stubbed(stub) == exported(SUBMODULES[path])


def test_the_stub_of_the_core_names_what_it_exports() -> None:
    assert stubbed(PACKAGE / "_core/__init__.pyi") == exported(_core)


def test_the_stub_of_the_cuda_module_names_what_it_exports() -> None:
    cuda = pytest.importorskip("twofold._cuda", reason="this build has no CUDA module")
    assert stubbed(PACKAGE / "_cuda.pyi") == exported(cuda)
