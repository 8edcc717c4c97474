"""Who may import whom, as docs/design.md says it, read from the sources: `import` by AST, `#include` by line.

Every import counts, also one inside a function or under TYPE_CHECKING. The checkers are tried on small wrong trees as
well, so that a green result means something.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Of twofold.<room>, what may it import? Besides `api` and itself only what is listed; a module named in full has a rule
# of its own. Rooms stand in the order of docs/design.md, downward.
NATIVE = {"_core", "blocks.ops"}
MODELS = {"weights", "blocks", "models"}
OF_ENGINE = (
    "capacity",
    "expert_loading",
    "runner",
    "sampler",
    "sequences",
)  # what a device's runner is made of
ENGINE = {"experts", "device", "tokenizer", "engine", "telemetry", "rules"} | MODELS | NATIVE
ALLOWED: dict[str, set[str]] = {
    "__init__": set(),
    "api": {"weights.weight_format"},
    "chat": set(),
    "weights": set(),
    "weights.weight_format": {"weights.format_table"},
    "weights.format_table": set(),
    "weights.json_file": set(),
    "weights.gguf_file": set(),
    "weights.host_memory": set(),
    "blocks": {"weights", "_cuda"} | NATIVE,
    "models": {"weights", "blocks", "chat.marks"},
    "models.bundled": set(),
    "models.quantise": {
        "tokenizer",
        "experts",
        "engine.expert_loading",
        "rules.rule_parts",
        "rules.yaml_file",
    }
    | MODELS
    | NATIVE,
    "rules": MODELS | NATIVE,
    "rules.rule_parts": {"rules.yaml_file", "weights.weight_format"},
    "rules.yaml_file": set(),
    "experts": {"weights", "_cuda"} | NATIVE,
    "tokenizer": {"weights.json_file", "weights.gguf_file"},
    "telemetry": set(),
    "device": {"experts", "_cuda"} | {f"engine.{name}" for name in OF_ENGINE} | MODELS | NATIVE,
    "engine": {"experts", "device", "tokenizer", "telemetry.sink", "telemetry.routing", "rules"}
    | MODELS
    | NATIVE,
    "engine.scheduler": {"engine"},
    "engine.kv_cache": {"engine.sequences"},
    "engine.page_tree": set(),
    "engine.prefix_cache": {
        f"engine.{name}"
        for name in ("kv_cache", "page_tree", "prefix_disk", "prefix_store", "sequences", "state_memory")
    },
    "engine.prefix_disk": {"engine.page_tree", "engine.prefix_store", "engine.state_memory"},
    "engine.prefix_store": set(),
    "engine.sequences": {"engine.page_tree"},
    "engine.state_memory": set(),
    "engine.prefill_budget": set(),
    "lab": {"telemetry", "experts", "engine", "weights", "models.bundled"} | NATIVE,
    "lab.kv_cache": MODELS | NATIVE,
    "lab.decoded_text": {"experts", "engine"} | MODELS | NATIVE,
    "lab.deferral": {"experts", "lab.decoded_text"} | NATIVE,
    "lab.cache_prior": {"experts", "lab.decoded_text"} | NATIVE,
    "server": ENGINE | {"chat"},
    "loadgen": set(),
    "cli": {"server", "lab", "loadgen", "chat"} | ENGINE,
}

# Third-party packages that only some units may import, because the others must run without them.
ONLY_IN: dict[str, set[str]] = {
    **{name: {"server"} for name in ("fastapi", "starlette", "uvicorn", "pydantic", "anyio")},
    **{name: {"telemetry"} for name in ("sqlalchemy", "psycopg")},
    **{
        name: set()
        for name in ("streamlit", "plotly", "pandas", "locust", "gevent", "openai", "httpx", "requests")
    },
    "transformers": {"cli", "models.testing"},
    "llguidance": {"engine.grammar_source", "engine.constraints"},
    "gguf": {"weights.gguf_file", "models.testing_gguf"},
    "torch": {"blocks", "device", "cli", "experts.expert_statistics"},
    "pytest": set(),
}

# Of C++ in <folder>, what may it include? Quoted names are resolved to the folder that holds the header.
ROOM_ORDER = [f"engine/runtime/{name}" for name in ("host", "ops", "moe", "device", "cuda")]
ROOMS = set(ROOM_ORDER)
ROOMS_BELOW = {room: set(ROOM_ORDER[: place + 1]) for place, room in enumerate(ROOM_ORDER)}
CPP_ALLOWED: dict[str, set[str]] = {
    "engine/core": {"engine/core"},
    "kernels/include": {"kernels/include"},
    "kernels/formats": {"kernels/include", "kernels/formats"},
    "kernels/cpu": {"kernels/include", "kernels/formats", "kernels/cpu"},
    "kernels/cuda": {"kernels/include", "kernels/cuda"},
    "kernels/bench": {"kernels/include", "kernels/bench"} | ROOMS,
    **{room: {"engine/core", "kernels/include", "kernels/cuda"} | ROOMS_BELOW[room] for room in ROOMS},
    "engine/bindings": {"engine/bindings", "engine/core", "kernels/include", "kernels/cuda"} | ROOMS,
}
CUDA, TORCH, PYTHON, ISA = (
    r"cuda|cublas|nv",
    r"torch|ATen|c10",
    r"Python\.h|pybind11",
    r"(imm|x86|avx\w*|arm_neon|e?mm)intrin\b",
)
CPP_FORBIDDEN_SYSTEM: dict[str, str] = {
    "engine/core": rf"{CUDA}|{TORCH}|{PYTHON}|{ISA}|pthread|thread|mutex|condition_variable",
    "kernels/include": rf"{CUDA}|{TORCH}|{PYTHON}|{ISA}",
    "kernels/formats": rf"{CUDA}|{TORCH}|{PYTHON}|{ISA}",
    "kernels/cpu": rf"{CUDA}|{TORCH}|{PYTHON}",
    "kernels/cuda": rf"{TORCH}|{PYTHON}",
    "kernels/bench": rf"{TORCH}|{PYTHON}",
    **dict.fromkeys(ROOMS, rf"{TORCH}|{PYTHON}"),
    "engine/bindings": TORCH,
}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "stuff", "tools"}
MAX_LINES = 450


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


def package_violations(engine: Path) -> list[str]:
    """Wrong imports inside the package `engine/twofold`."""
    wrong = []
    for source in sorted((engine / "twofold").rglob("*.py")):
        relative = source.relative_to(engine).with_suffix("")
        module = ".".join(relative.parts).removesuffix(".__init__")
        room = relative.parts[1]
        rule = ".".join(relative.parts[1:3])
        if room not in ALLOWED:
            wrong.append(f"{relative}: twofold.{room} has no place in the design's table; give it one")
            continue
        for line, name in python_imports(source, module):
            parts = name.split(".")
            if parts[0] != "twofold":
                allowed_in = ONLY_IN.get(parts[0])
                if allowed_in is not None and not {room, rule} & allowed_in:
                    wrong.append(f"{relative}:{line}: {room} may not import {parts[0]}")
                continue
            target = parts[1] if len(parts) > 1 else "__init__"
            allowed = {"api"} | (ALLOWED[rule] if rule in ALLOWED else ALLOWED[room] | {room})
            if target.startswith("__") or {target, ".".join(parts[1:3])} & (allowed | {rule}):
                continue
            wrong.append(f"{relative}:{line}: {rule if rule in ALLOWED else room} may not import {name}")
    return wrong


def outside_violations(root: Path) -> list[str]:
    """Wrong imports in dashboard (telemetry.queries only), loadtest (HTTP only) and others (public names only)."""
    wrong = []
    for folder in ("dashboard", "loadtest", "benchmarks", "models", "scripts"):
        for source in sorted((root / folder).rglob("*.py")):
            where = source.relative_to(root)
            for line, name in python_imports(source, source.stem):
                parts = name.split(".")
                if parts[0] == "tests":
                    wrong.append(f"{where}:{line}: only tests import tests, not {name}")
                if parts[0] != "twofold":
                    continue
                if (
                    folder == "dashboard"
                    and parts[1:3] != ["telemetry", "queries"]
                    and parts[1:3] != ["api", "errors"]
                ):
                    wrong.append(f"{where}:{line}: the dashboard reads telemetry.queries only, not {name}")
                elif folder == "loadtest" and parts[1:2] != ["loadgen"] and parts[1:3] != ["api", "errors"]:
                    wrong.append(
                        f"{where}:{line}: the load test speaks HTTP only, it may import loadgen, not {name}"
                    )
                elif any(part.startswith("_") and part != "__version__" for part in parts):
                    wrong.append(f"{where}:{line}: {folder} use public names only, not {name}")
    return wrong


def cpp_folder(path: Path, root: Path) -> str:
    """The folder that a rule of CPP_ALLOWED speaks of; of the runtime, the room."""
    parts = path.relative_to(root).parts
    return "/".join(parts[: 3 if parts[:2] == ("engine", "runtime") else 2])


def cpp_sources(root: Path) -> list[Path]:
    found = [p for top in ("engine", "kernels") for p in (root / top).rglob("*")]
    return sorted(p for p in found if p.suffix in {".h", ".hpp", ".cpp", ".cc", ".inc", ".cu", ".cuh"})


def cpp_violations(root: Path) -> list[str]:
    """Wrong `#include` lines, and headers of ours that cannot be found."""
    sources = cpp_sources(root)
    wrong = []
    for source in sources:
        folder = cpp_folder(source, root)
        where = source.relative_to(root)
        if folder not in CPP_ALLOWED:
            wrong.append(f"{where}: the folder {folder} has no place in the design's table; give it one")
            continue
        for number, text in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
            match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', text)
            if match is None:
                continue
            bracket, name = match.groups()
            if bracket == "<" and not name.startswith("twofold/"):
                if re.match(CPP_FORBIDDEN_SYSTEM[folder], name):
                    wrong.append(f"{where}:{number}: {folder} may not include <{name}>")
                continue
            beside = (source.parent / name).resolve()
            owners = {cpp_folder(beside, root)} if beside in sources else set()
            owners = owners or {cpp_folder(p, root) for p in sources if str(p).endswith("/" + name)}
            if not owners:
                wrong.append(f"{where}:{number}: no header of ours is called {name}")
            elif not owners & CPP_ALLOWED[folder]:
                wrong.append(
                    f"{where}:{number}: {folder} may not include {name} of {', '.join(sorted(owners))}"
                )
    return wrong


def test_package_imports_point_downward() -> None:
    assert "\n".join(package_violations(ROOT / "engine")) == ""


def test_dashboard_loadtest_and_scripts_stay_outside() -> None:
    assert "\n".join(outside_violations(ROOT)) == ""


def test_cpp_includes_point_downward() -> None:
    assert "\n".join(cpp_violations(ROOT)) == ""


def test_core_is_compiled_without_isa_flags_cuda_torch_or_python() -> None:
    text = re.sub(r"#.*", "", (ROOT / "engine/core/CMakeLists.txt").read_text(encoding="utf-8"))
    assert re.findall(r"-m(?:avx|fma|sse|f16c|arch|tune)\S*|CUDA|[Tt]orch|Python|pybind11", text) == []


def test_kernels_is_no_python_package() -> None:
    assert list((ROOT / "kernels").rglob("__init__.py")) == []


def code_files() -> list[Path]:
    tops = ("engine", "kernels", "dashboard", "loadtest", "benchmarks", "models", "scripts", "tests")
    found = [p for top in tops for p in (ROOT / top).rglob("*") if "__pycache__" not in p.parts]
    return sorted(p for p in found if p.suffix in {".py", ".sh", ".h", ".cpp", ".inc", ".cu", ".cuh"})


def test_no_module_has_a_name_that_says_nothing() -> None:
    vague = [p for p in code_files() if {p.stem, p.parent.name} & VAGUE_NAMES]
    assert vague == []


def test_files_stay_short_enough_to_read() -> None:
    lengths = {
        p.relative_to(ROOT).as_posix(): len(p.read_text(encoding="utf-8").splitlines()) for p in code_files()
    }
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


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
    pytest.importorskip("twofold._core", reason="the native module is not built")
    refused = {name for name in ONLY_IN if name != "torch"}
    modules = [
        "twofold",
        "twofold.blocks.ops",
        "twofold.engine",
        "twofold.models",
        "twofold.tokenizer",
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
        (
            "engine/twofold/blocks/gqa.py",
            "from twofold.engine import Engine",
            "may not import twofold.engine.Engine",
        ),
        ("engine/twofold/blocks/gqa.py", "from ..server import app", "may not import twofold.server.app"),
        (
            "engine/twofold/engine/kv_cache.py",
            "def f():\n    import twofold.engine.sampler",
            "engine.kv_cache may not",
        ),
        (
            "engine/twofold/engine/engine.py",
            "from twofold.telemetry.writer import W",
            "twofold.telemetry.writer",
        ),
        ("engine/twofold/engine/engine.py", "import fastapi.responses", "engine may not import fastapi"),
        (
            "engine/twofold/api/types.py",
            "from twofold.weights.gguf_file import GgufFile",
            "api may not import",
        ),
        ("engine/twofold/newcomer.py", "", "twofold.newcomer has no place"),
    ],
)
def test_a_wrong_package_import_is_found(tmp_path: Path, path: str, source: str, complaint: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert [complaint in text for text in package_violations(tmp_path / "engine")] == [True]


def test_right_package_imports_pass(tmp_path: Path) -> None:
    file = tmp_path / "engine/twofold/engine/engine.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "from twofold.telemetry.sink import TelemetrySink\nfrom .model import load_model\nfrom .. import __version__\n"
        "from twofold.api.errors import ConfigError\nimport numpy\n"
    )
    assert package_violations(tmp_path / "engine") == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("dashboard/app.py", "from twofold.engine import Engine", "reads telemetry.queries only"),
        ("loadtest/run.py", "import twofold", "speaks HTTP only"),
        ("scripts/train.py", "import twofold._core", "public names only"),
        ("benchmarks/gpu/runs.py", "from twofold._core import kernels", "benchmarks use public names only"),
        ("benchmarks/gpu/runs.py", "from tests.told_sampler import ToldSampler", "only tests import tests"),
    ],
)
def test_a_wrong_import_outside_is_found(tmp_path: Path, path: str, source: str, complaint: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert [complaint in text for text in outside_violations(tmp_path)] == [True]


@pytest.mark.parametrize(
    ("path", "line", "complaint"),
    [
        (
            "engine/core/planner.cpp",
            '#include "thread_pool.h"',
            "may not include thread_pool.h of engine/runtime/host",
        ),
        ("engine/core/planner.cpp", "#include <immintrin.h>", "may not include <immintrin.h>"),
        ("engine/core/planner.cpp", "#include <cuda_runtime.h>", "may not include <cuda_runtime.h>"),
        ("engine/core/planner.cpp", "#include <pybind11/numpy.h>", "may not include <pybind11/numpy.h>"),
        (
            "kernels/include/twofold/kernels.h",
            "#include <torch/extension.h>",
            "may not include <torch/extension.h>",
        ),
        ("kernels/include/twofold/kernels.h", '#include "thread_pool.h"', "of engine/runtime"),
        ("kernels/cpu/generic.cpp", "#include <twofold/expert_cache.h>", "of engine/core"),
        ("engine/runtime/host/pages.cpp", '#include "moe/executor.h"', "of engine/runtime/moe"),
        ("engine/runtime/moe/executor.cpp", '#include "nowhere.h"', "no header of ours is called nowhere.h"),
    ],
)
def test_a_wrong_include_is_found(tmp_path: Path, path: str, line: str, complaint: str) -> None:
    for header in (
        "engine/runtime/moe/executor.h",
        "engine/runtime/host/thread_pool.h",
        "engine/core/include/twofold/expert_cache.h",
    ):
        (tmp_path / header).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / header).write_text("#include <cstdint>\n")
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(line + "\n")
    assert [complaint in text for text in cpp_violations(tmp_path)] == [True]
