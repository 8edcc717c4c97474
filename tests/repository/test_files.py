"""What keeps files readable: classes of few methods, one subject per file, names that say something, tests by package.

Lines and folders have generous limits against files that have become unreadable. They are no size to aim at.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
TOPS: Final = ("engine", "kernels", "dashboard", "loadtest", "benchmarks", "models", "scripts", "tests")
VAGUE_NAMES: Final = {"utils", "util", "helpers", "helper", "common", "misc", "stuff"}
MAX_LINES: Final = 600
MAX_ENTRIES: Final = 40
MAX_METHODS: Final = 20
SUBJECT_METHODS: Final = 10
"""A class with more methods is a subject of its own."""

MORE_METHODS: Final = {
    "engine/runtime/device/device_accelerator.h: DeviceAccelerator": 27,
    "engine/runtime/device/upload_engine.h: UploadEngine": 33,
    "engine/runtime/moe/accelerator.h: Accelerator": 26,
    "engine/runtime/moe/expert_store.h: ExpertStore": 23,
    "engine/runtime/moe/moe_executor.h: MoeExecutor": 33,
    "engine/runtime/moe/slotted_accelerator.h: SlottedAccelerator": 33,
    "engine/twofold/blocks/gqa.py: Gqa": 22,
    "engine/twofold/engine/engine.py: Engine": 25,
    "engine/twofold/engine/kv_cache.py: PagePool": 30,
    "engine/twofold/engine/prefix/cache.py: CachingPool": 33,
    "engine/twofold/server/bridge/models/model_manager.py: ModelManager": 24,
    "engine/twofold/server/openai/chat_format.py: ChatFormat": 25,
    "engine/twofold/server/openai/formats.py: AnswerFormat": 29,
    "engine/twofold/telemetry/writer.py: DatabaseSink": 23,
    "engine/twofold/text/chat/reader.py: TextReader": 29,
    "engine/twofold/text/tokenizer/__init__.py: Tokenizer": 25,
    "kernels/cpu/avx2/integer_vector.h: Avx2Integer": 32,
    "kernels/cpu/avx2/vector.h: Avx2": 32,
    "kernels/cpu/avx512/vector.h: Avx512": 32,
    "kernels/cpu/avx512/vnni_vector.h: Avx512Vnni": 31,
    "kernels/formats/one_row.h: OneRow": 22,
    "tests/device/fake/fake_device.h: Device": 30,
    "tests/simt/machine/machine.h: Machine": 32,
    "tests/simt/machine/shadow.h: Shadow": 25,
}
"""Classes with more than MAX_METHODS methods. None may be added or grow; a row leaves with its class."""

SEVERAL_SUBJECTS: Final = {
    "engine/twofold/server/bridge/models/protocol.py",
    "engine/twofold/server/openai/schemas.py",
    "engine/twofold/telemetry/sink.py",
    "tests/server/fake_engine.py",
}
"""Python files with several classes of more than SUBJECT_METHODS methods. None may be added."""


def code_files() -> list[Path]:
    found = [p for top in TOPS for p in (ROOT / top).rglob("*") if "__pycache__" not in p.parts]
    return sorted(p for p in found if p.suffix in {".py", ".sh", ".h", ".cpp", ".inc", ".cu", ".cuh"})


def python_methods(text: str) -> Iterator[tuple[str, int]]:
    """(class, methods); overloads and setters of one name count once."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            names = {n.name for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
            yield node.name, len(names)


_COMMENT: Final = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_CLASS: Final = re.compile(r"\b(?:class|struct)\s+(?:\[\[\w+\]\]\s*)?(\w+)[^;{}()=]*\{")
_ARGUMENTS: Final = re.compile(r"\([^()]*\)")
_VALUE: Final = re.compile(r"=\s*(?!0\s*;|default|delete)[^;{]*;|\(\)\s*(?:noexcept\s*)?:[^;{]*\{")
"""What a field begins with, and what a constructor gives to fields."""
_METHOD: Final = re.compile(r"(~?\b\w+)\s*\(\)\s*(?:const|noexcept|override|final|->|=|;|\{)")
_NO_METHODS: Final = {
    "if",
    "for",
    "while",
    "switch",
    "return",
    "noexcept",
    "explicit",
    "decltype",
    "requires",
}


def cpp_methods(text: str) -> Iterator[tuple[str, int]]:
    """(class, functions declared in its body), by names followed by arguments and what may follow a declaration."""
    text = _COMMENT.sub("", text)
    for found in _CLASS.finditer(text):
        depth, begin, body = 1, found.end(), []
        for brace in re.finditer("[{}]", text[found.end() :]):
            place = found.end() + brace.start()
            if depth == 1:
                body.append(text[begin:place] + brace[0])
            depth += 1 if brace[0] == "{" else -1
            begin = place + 1
            if depth == 0:
                break
        flat = _ARGUMENTS.sub("()", _ARGUMENTS.sub("()", "".join(body)))
        flat = _VALUE.sub(lambda value: "(){" if value[0].startswith("(") else ";", flat)
        yield found[1], len(set(_METHOD.findall(flat)) - _NO_METHODS)


@cache
def methods() -> dict[str, int]:
    """Number of methods by file and class."""
    found = {}
    for path in code_files():
        read = python_methods if path.suffix == ".py" else cpp_methods
        if path.suffix not in {".sh", ".inc"}:
            for name, count in read(path.read_text(encoding="utf-8")):
                found[f"{path.relative_to(ROOT).as_posix()}: {name}"] = count
    return found


def test_kernels_is_no_python_package() -> None:
    assert list((ROOT / "kernels").rglob("__init__.py")) == []


def test_no_module_has_an_empty_name() -> None:
    vague = [p for p in code_files() if {p.stem, p.parent.name} & VAGUE_NAMES]
    assert vague == []


def test_classes_have_few_methods() -> None:
    found = {name: count for name, count in methods().items() if count > MAX_METHODS}
    grown = {name: n for name, n in found.items() if n > MORE_METHODS.get(name, MAX_METHODS)}
    assert grown == {}, "divide the class by subject"
    assert sorted(MORE_METHODS.keys() - found.keys()) == [], "remove rows of classes that have become small"


def test_a_file_has_one_subject() -> None:
    large = Counter(
        name.partition(": ")[0]
        for name, count in methods().items()
        if count > SUBJECT_METHODS and name.partition(": ")[0].endswith(".py")
    )
    assert {name for name, count in large.items() if count > 1} == SEVERAL_SUBJECTS


def test_every_python_file_states_its_subject_in_one_line() -> None:
    """The first line of a docstring: what the file is about, readable alone."""
    nothing = [
        path.relative_to(ROOT).as_posix()
        for path in code_files()
        if path.suffix == ".py"
        and path.stat().st_size
        and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert nothing == []


def test_no_file_or_folder_is_beyond_reading() -> None:
    lengths = {
        p.relative_to(ROOT).as_posix(): len(p.read_text(encoding="utf-8").splitlines()) for p in code_files()
    }
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}
    folders = Counter(p.parent for p in code_files())
    assert {folder for folder, count in folders.items() if count > MAX_ENTRIES} == set()


def test_no_test_module_imports_another() -> None:
    """What several need is in a module without tests, so that a test can move or leave alone."""
    imports = {
        (path.relative_to(ROOT).as_posix(), module)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for module in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
    }
    assert {(path, module) for path, module in imports if re.search(r"(^|\.)test_\w+$", module)} == set()


def test_every_package_has_its_folder_of_tests() -> None:
    folders = [*(ROOT / "engine/twofold").iterdir(), *(ROOT / "engine/twofold/tools").iterdir()]
    packages = {path.name for path in folders if (path / "__init__.py").is_file()} - {"tools"}
    assert packages - {path.name for path in (ROOT / "tests").iterdir()} == {"loadgen"}  # in tests/loadtest


@pytest.mark.parametrize("read", [python_methods, cpp_methods])
def test_methods_are_counted(read) -> None:
    python = "class A:\n    x = 1\n    def f(self): ...\n    async def g(self):\n        def inner(): ...\n"
    cpp = """
        class A : public B {  // void no();
          A(int x) : x_(f(x)) { if (x) return; }
          virtual std::vector<int> f(std::span<int> a = {}) const = 0;
          int x_ = call();
        };
    """
    assert dict(read(python if read is python_methods else cpp)) == {"A": 2}
