"""Nothing is unused: every setting is read by the product, every native binding is called by it.

Read from the sources, so that bindings of the CUDA module count on machines without one. What only tests call lies in
`tests/native/module` (`twofold._testing`). The searches are tried on wrong sources as well.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from twofold.api.config import EngineConfig, ServerConfig, TelemetryConfig

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("engine/twofold", "dashboard", "loadtest", "benchmarks", "scripts")
REPORTS = {"doctor.py", "machine_checks.py"}
"""They only tell a setting, or whether it can be met."""


def sources(*folders: str) -> list[str]:
    found = [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]
    return [p.read_text() for p in found if "api" not in p.parts and p.name not in REPORTS]


def settings_read(texts: Iterable[str]) -> set[str]:
    """Attributes that are read of something called a configuration."""
    read = set()
    for node in (node for text in texts for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if name.endswith("config"):
                read.add(node.attr)
    return read


def bindings(text: str) -> set[str]:
    """Functions, methods, properties and classes that C++ exports to Python; plain fields of records are not meant."""
    for_callers = (
        r"\.def(?:_static|_property|_property_readonly|_buffer)?\(\s*\"(\w+)\"|class_<.*?>\(\s*m,\s*\"(\w+)\""
    )
    found = {name for pair in re.findall(for_callers, text, re.DOTALL) for name in pair}
    return {name for name in found if name and not name.startswith("__")}


def members(text: str) -> dict[str, set[str]]:
    """Exported members of each exported class."""
    classes = re.split(r'class_<.*?>\(\s*m,\s*"', text, flags=re.DOTALL)[1:]
    return {
        body.partition('"')[0]: set(re.findall(r'\.def\w*\(\s*"(\w+)"', re.split(r";\n", body)[0]))
        for body in classes
    }


def names_used(texts: Iterable[str]) -> set[str]:
    used = set()
    for node in (node for text in texts for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            used |= {alias.name for alias in node.names}
    return used


def uncalled(exports: Iterable[str], callers: Iterable[str]) -> set[str]:
    """Exported names that no caller uses. A class that others hand out counts by what is used of it."""
    used = names_used(callers)
    wrong: set[str] = set()
    for text in exports:
        handed_out = {name for name, inside in members(text).items() if inside & used}
        wrong |= bindings(text) - used - handed_out
    return wrong


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig, TelemetryConfig])
def test_the_product_reads_every_setting(config: type) -> None:
    read = settings_read(sources("engine/twofold"))
    fields = [field for field in dataclasses.fields(config) if not field.metadata["scheduler_option"]]
    assert [field.name for field in fields if field.name not in read] == []


def test_the_product_calls_every_binding() -> None:
    folder = ROOT / "engine/bindings"
    exports = [p.read_text() for p in folder.rglob("*.cpp") if p.parent.name != "testing"]
    # Checks on a GPU run the real module, which has nothing for tests alone. Tests pack experts as slots hold them.
    # SlottedAccelerator is a base class without members: other modules derive from it.
    shared = [
        (ROOT / p).read_text()
        for p in ("tests/kernels/packed_experts.py", "engine/twofold/api/core_tables.py")
    ]
    assert uncalled(exports, [*sources(*PRODUCT, "tests/gpu"), *shared]) - {"SlottedAccelerator"} == set()


def test_the_product_does_not_call_what_is_for_tests() -> None:
    assert [text for text in sources(*PRODUCT) if re.search(r"_core(\.| import )testing", text)] == []


def test_an_unread_setting_and_an_uncalled_binding_are_found() -> None:
    text = "a = config.model\nargs.seed\nself.config.port = 1"
    assert settings_read([text]) == {"model"}
    export = 'py::class_<A>(m, "A")\n.def("run", &A::run)\n.def("stop", [](A& a) { a.stop(); });\nm.def("go", &go);'
    export += 'py::class_<B>(m, "B").def_readonly("x", &B::x);'
    assert uncalled([export], ["a.run()"]) == {"stop", "go", "B"}
    assert uncalled([export], ["from m import go\na.stop(a.run, b.x)"]) == set()
