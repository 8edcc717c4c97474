"""Allowed imports, as in docs/design.md, read from the sources: `import` by AST, `#include` by line.

Every import counts, also one inside a function or under TYPE_CHECKING. The checkers are tried on small wrong trees as
well, so that a green result means something. import-linter checks the contracts of pyproject.toml, in `make lint` too:
no circles of rooms, packages that only some rooms may import, and what programs outside the package import. It cannot
say the rest. Its contracts forbid, while the table here lists what is used: a row that allows too much fails as well.
It sees no native modules and no private names, and only circles of neighbours where ours are of files.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRACTS: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "importlinter"
]["contracts"]
LINT: Final = """import sys
sys.meta_path[:] = [each for each in sys.meta_path if each.__module__.startswith("_frozen_importlib")]
from importlinter.cli import import_linter
import_linter()"""
"""An editable installation finds its own packages first; here they are found by path."""

# Rooms of the package, lower ones first, and the rooms that each one imports: no more, no less. Folders of
# `server`, `text` and `tools` are rooms of their own; `__init__` is the version.
ROOMS_TABLE: Final = """
__init__:
api: _core
hub: api
weights: _core api
adapters: api weights
blocks: _core api weights
experts: _core api blocks weights
text.schemas:
text.markdown:
text.chat: api text.schemas
text.tokenizer: api weights
text.conversation: api text.tokenizer
models: api blocks text.chat text.tokenizer weights
step: _core adapters api blocks experts models text.tokenizer weights
parallel: __init__ _core api blocks experts models step
device: _core _cuda adapters api blocks experts models step weights
vision: api blocks models text.conversation text.tokenizer weights
training: _core api blocks device experts models step text.conversation text.tokenizer weights
fit: _core api blocks device experts models step weights
rules: api blocks models weights
telemetry: _core api
engine: __init__ _core adapters api blocks device experts models rules step telemetry text.schemas text.tokenizer
    vision weights
quantise: _core adapters api blocks experts models rules step text.tokenizer weights
server.http: api
server.bridge:
server.bridge.observe: api server.http
server.bridge.models: __init__ api models server.bridge.observe server.http telemetry text.chat
    text.conversation text.tokenizer vision weights
server.bridge.requests: api server.bridge.models server.bridge.observe server.http
server.openai: __init__ api server.bridge.models server.bridge.observe server.bridge.requests server.http
    text.chat text.conversation text.schemas vision weights
server.admin: __init__ api server.bridge.models server.bridge.observe server.bridge.requests server.http
    telemetry weights
server.anthropic: api server.bridge.models server.bridge.requests server.http server.openai text.conversation
server.pooling: api server.bridge.models server.bridge.observe server.bridge.requests server.http server.openai
server.llama_cpp: api server.bridge.models server.bridge.requests server.http server.openai
server.ollama: __init__ api server.bridge.models server.bridge.requests server.http server.openai server.pooling
    text.chat weights
server.web: api server.bridge.models server.bridge.requests server.http telemetry text.markdown
server.responses: api server.bridge.models server.bridge.requests server.http server.openai text.chat
    text.conversation
server: __init__ api server.admin server.anthropic server.bridge.models server.bridge.requests server.http
    server.llama_cpp server.ollama server.openai server.pooling server.responses server.web telemetry
server.fleet: api server server.bridge.models server.bridge.observe server.bridge.requests server.http
text:
tools:
tools.loadgen: api
tools.cli: __init__ adapters api blocks device engine experts fit hub models parallel quantise rules server
    server.bridge.models server.fleet step telemetry text.chat text.conversation text.markdown text.tokenizer
    tools.loadgen training vision weights
tools.lab: _core api blocks engine experts models quantise server.fleet step telemetry tools.loadgen weights
"""
ROOMS_USED: Final = {
    room: set(used.split())
    for room, _, used in (row.partition(":") for row in ROOMS_TABLE.replace("\n    ", " ").split("\n") if row)
}


def python_imports(source: Path, module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that `source`, which is `module`, imports; relative imports resolved."""
    is_package = source.name == "__init__.py"
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"), str(source))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".") if is_package else module.split(".")[:-1]
                parts = parts[: len(parts) - node.level + 1]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def room_of(module: str) -> str:
    """The room of a dotted module name below `twofold`: its first part, or two or three where these hold rooms."""
    parts = module.split(".")[1:] or ["__init__"]
    for count in (3, 2):
        if ".".join(parts[:count]) in ROOMS_USED:
            return ".".join(parts[:count])
    return "__init__" if parts[0].startswith("__") else parts[0]


def modules_of(engine: Path) -> dict[str, Path]:
    """The package's files by dotted name. `engine` holds `twofold`."""
    return {
        ".".join(source.relative_to(engine).with_suffix("").parts).removesuffix(".__init__"): source
        for source in sorted((engine / "twofold").rglob("*.py"))
    }


def files_used(engine: Path) -> dict[str, set[str]]:
    """Modules of the package that each of its modules imports, also for types only and inside functions."""
    modules = modules_of(engine)
    used: dict[str, set[str]] = {}
    for module, source in modules.items():
        names = {name for _, name in python_imports(source, module)}
        found = {name if name in modules else name.rpartition(".")[0] for name in names}
        used[module] = found & modules.keys() - {module}
    return used


def importers_of(engine: Path, native: str) -> list[str]:
    """Modules that import a native module, or name it for a dynamic import."""
    return [
        module
        for module, source in modules_of(engine).items()
        if any(name == native or name.startswith(f"{native}.") for _, name in python_imports(source, module))
        or any(
            isinstance(node, ast.Constant) and node.value == native
            for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        )
    ]


def rooms_used(engine: Path) -> dict[str, dict[str, str]]:
    """Rooms that each room imports, each with one place that does. `engine` holds `twofold`."""
    used: dict[str, dict[str, str]] = {}
    for source in sorted((engine / "twofold").rglob("*.py")):
        relative = source.relative_to(engine).with_suffix("")
        module = ".".join(relative.parts).removesuffix(".__init__")
        here = used.setdefault(room_of(module), {})
        for line, name in python_imports(source, module):
            if name.split(".")[0] == "twofold" and room_of(name) != room_of(module):
                here.setdefault(room_of(name), f"{relative}:{line}")
    return used


def table_differences(used: dict[str, dict[str, str]]) -> list[str]:
    """Imports that ROOMS_USED lacks, and entries of it that no import needs."""
    wrong = [f"twofold.{room} has no entry in ROOMS_USED" for room in used if room not in ROOMS_USED]
    for room, allowed in ROOMS_USED.items():
        found = used.get(room, {})
        wrong += [
            f"{found[target]}: {room} may not import {target}" for target in sorted(found.keys() - allowed)
        ]
        wrong += [f"{room} no longer imports {target}" for target in sorted(allowed - found.keys())]
    return wrong


def circles(used: Mapping[str, Collection[str]]) -> list[str]:
    """Rooms that import themselves by way of other rooms."""

    def reached(room: str, seen: set[str]) -> set[str]:
        for target in set(used.get(room, ())) - seen:
            seen.add(target)
            reached(target, seen)
        return seen

    return [room for room in used if room in reached(room, set())]


def private_names(root: Path) -> list[str]:
    """Private names of the package that programs outside it import."""
    return [
        f"{source.relative_to(root)}:{line}: {name}"
        for folder in ("dashboard", "loadtest", "benchmarks", "models", "scripts")
        for source in sorted((root / folder).rglob("*.py"))
        for line, name in python_imports(source, source.stem)
        if name.startswith("twofold.")
        and any(part.startswith("_") and part != "__version__" for part in name.split("."))
    ]


def broken_contracts(*folders: Path) -> set[str]:
    """Names of the contracts of pyproject.toml that packages and programs in `folders` break."""
    done = subprocess.run(
        [sys.executable, "-c", LINT, "lint", "--no-cache", "--no-logo", str(ROOT / "pyproject.toml")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "COLUMNS": "200"},
        cwd=folders[-1],
    )
    assert "Contracts: " in done.stdout, done.stdout + done.stderr
    return set(re.findall(r"^(.*) BROKEN", done.stdout, re.MULTILINE))


def test_each_room_imports_what_the_table_lists() -> None:
    assert "\n".join(table_differences(rooms_used(ROOT / "engine"))) == ""


def test_every_contract_is_kept() -> None:
    assert broken_contracts(ROOT / "engine", ROOT) == set()


def test_no_files_import_each_other() -> None:
    assert circles(files_used(ROOT / "engine")) == []


def test_one_file_imports_the_device_backend() -> None:
    assert importers_of(ROOT / "engine", "twofold._cuda") == ["twofold.device.backend"]


def test_programs_outside_use_public_names() -> None:
    assert private_names(ROOT) == []


WITHOUT_EXTRAS = """
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {refused!r}:
            raise ModuleNotFoundError(f"{{name}} is not there (refused by the test)", name=name)
        return None
sys.meta_path.insert(0, Refuse())
for module in {modules!r}:
    importlib.import_module(module)
print("imported")
"""


def test_the_engine_imports_without_any_extra() -> None:
    """`import twofold.engine` needs torch, tokenizers, numpy, safetensors and jinja2, and none of the extras."""
    refused = {name for contract in CONTRACTS for name in contract.get("forbidden_modules", ())}
    refused -= {"torch", "twofold"}
    modules = [
        "twofold",
        "twofold.blocks.ops",
        "twofold.engine",
        "twofold.models",
        "twofold.text.tokenizer",
        "twofold.telemetry.sink",
    ]
    script = WITHOUT_EXTRAS.format(refused=refused, modules=modules)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT / "engine"
    )
    assert done.stdout.strip() == "imported", done.stderr


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("blocks/gqa.py", "from twofold.engine import Engine", "blocks may not import engine"),
        ("blocks/gqa.py", "from ..server import app", "blocks may not import server"),
        ("step/sampler.py", "def f():\n    import twofold.engine.engine", "step may not import engine"),
        ("api/types.py", "from twofold.weights.gguf_file import GgufFile", "api may not import weights"),
        (
            "server/http/errors.py",
            "from twofold.server.openai import schemas",
            "may not import server.openai",
        ),
        ("unlisted.py", "", "unlisted has no entry"),
    ],
)
def test_a_wrong_package_import_is_found(tmp_path: Path, path: str, source: str, complaint: str) -> None:
    file = tmp_path / "twofold" / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    found = [text for text in table_differences(rooms_used(tmp_path)) if "no longer" not in text]
    assert [complaint in text for text in found] == [True]


def test_an_entry_that_no_import_needs_is_found(tmp_path: Path) -> None:
    file = tmp_path / "twofold/blocks/gqa.py"
    file.parent.mkdir(parents=True)
    file.write_text("from twofold.api.errors import ConfigError\nfrom .. import _core\n")
    assert "blocks no longer imports weights" in table_differences(rooms_used(tmp_path))


def test_files_that_import_each_other_and_native_modules_are_found(tmp_path: Path) -> None:
    sources = {
        "a.py": "from twofold.b import B",
        "b.py": "def f():\n    from twofold import a",
        "c.py": "import twofold._cuda",
        "d.py": 'import importlib\nimportlib.import_module("twofold._cuda")',
        "e.py": "from twofold import a, _core",
    }
    (tmp_path / "twofold").mkdir()
    for name, source in sources.items():
        (tmp_path / "twofold" / name).write_text(source)
    assert circles(files_used(tmp_path)) == ["twofold.a", "twofold.b"]
    assert importers_of(tmp_path, "twofold._cuda") == ["twofold.c", "twofold.d"]


def test_a_circle_is_found() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}) == ["a", "b", "c"]


def test_private_names_outside_are_found(tmp_path: Path) -> None:
    for folder, source in (("scripts", "import twofold._core"), ("models", "from twofold.api import _x")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text(source)
    assert private_names(tmp_path) == [
        "models/train.py:1: twofold.api._x",
        "scripts/train.py:1: twofold._core",
    ]


def test_every_broken_contract_is_found(tmp_path: Path) -> None:
    sources = {
        "twofold/__init__.py": "",
        "twofold/engine/__init__.py": "def f():\n    from ..step import sampler",
        "twofold/step/__init__.py": "",
        "twofold/step/sampler.py": "import fastapi.responses\nfrom twofold.engine import f",
        "twofold/telemetry/queries.py": "",
        "dashboard/app.py": "from twofold.engine import Engine",
        "loadtest/run.py": "import twofold",
        "benchmarks/runs.py": "from tests.engine.scripted_sampler import ScriptedSampler",
        "models/train.py": "",
        "scripts/write.py": "",
    }
    for room in ("server/bridge", "telemetry", "text", "tools"):
        sources |= {f"twofold/{part}/__init__.py": "" for part in (room, *room.split("/")[:-1])}
    for path, source in sources.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    assert broken_contracts(tmp_path) == {contract["name"] for contract in CONTRACTS}
