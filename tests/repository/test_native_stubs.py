"""The stubs of the native modules are what the modules say, with refinements of what they have."""

from __future__ import annotations

import ast
import inspect

import pytest
from twofold import _core

from scripts.stubs import signatures
from scripts.stubs.__main__ import PACKAGE, STUBS, StaleError, refined_members, stub


@pytest.mark.parametrize("name", STUBS)
def test_a_stub_equals_the_generated_one(name: str) -> None:
    pytest.importorskip(f"twofold.{name.partition('.')[0]}", reason="this build has no CUDA module")
    assert (PACKAGE / STUBS[name]).read_text(encoding="utf-8") == stub(name), "run python -m scripts.stubs"


def test_every_submodule_has_a_stub() -> None:
    submodules = {f"_core.{name}" for name, value in vars(_core).items() if inspect.ismodule(value)}
    assert submodules == {name for name in STUBS if "." in name}


@pytest.mark.parametrize(
    "refinement",
    [
        "class Lost: ...",
        "class Timeline:\n    lost: int",
        "class Timeline:\n    def __init__(self, lost: int): ...",
        "def Timeline(): ...",
    ],
)
def test_a_refinement_of_what_the_module_lacks_is_refused(refinement: str) -> None:
    reported = ast.Module(list(signatures.definitions(_core)), [])
    with pytest.raises(StaleError, match=r"Lost|lost|another kind"):
        refined_members(reported, ast.parse(refinement), "module")
