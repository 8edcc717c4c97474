"""Allowed includes between C++ folders, as in docs/design.md; read from the `#include` lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Folders that C++ in <folder> may include. Quoted names are resolved to the folder that holds the header.
ROOM_ORDER = [f"engine/runtime/{name}" for name in ("host", "ops", "moe", "device", "cuda")]

ROOMS = set(ROOM_ORDER)

ROOMS_BELOW = {room: set(ROOM_ORDER[: place + 1]) for place, room in enumerate(ROOM_ORDER)}

CPP_ALLOWED: dict[str, set[str]] = {
    "engine/core": {"engine/core", "kernels/include"},
    "kernels/include": {"kernels/include"},
    "kernels/formats": {"kernels/include", "kernels/formats"},
    "kernels/cpu": {"kernels/include", "kernels/formats", "kernels/cpu"},
    "kernels/device": {"kernels/include", "kernels/device"},
    "kernels/cuda": {"kernels/include", "kernels/device", "kernels/cuda"},
    "kernels/bench": {"kernels/include", "kernels/bench"} | ROOMS,
    **{room: {"engine/core", "kernels/include", "kernels/device"} | ROOMS_BELOW[room] for room in ROOMS},
    "engine/bindings": {"engine/bindings", "engine/core", "kernels/include", "kernels/device"} | ROOMS,
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
    "kernels/device": rf"{CUDA}|{TORCH}|{PYTHON}",
    "kernels/cuda": rf"{TORCH}|{PYTHON}",
    "kernels/bench": rf"{TORCH}|{PYTHON}",
    **dict.fromkeys(ROOMS, rf"{TORCH}|{PYTHON}"),
    "engine/bindings": TORCH,
}


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


def test_cpp_includes_point_downward() -> None:
    assert "\n".join(cpp_violations(ROOT)) == ""


def test_core_is_compiled_without_isa_flags_cuda_torch_or_python() -> None:
    text = re.sub(r"#.*", "", (ROOT / "engine/core/CMakeLists.txt").read_text(encoding="utf-8"))
    assert re.findall(r"-m(?:avx|fma|sse|f16c|arch|tune)\S*|CUDA|[Tt]orch|Python|pybind11", text) == []


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
        ("kernels/cpu/generic/table.cpp", "#include <twofold/expert_cache.h>", "of engine/core"),
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
