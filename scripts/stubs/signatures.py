"""What a module compiled with pybind11 says of its functions and classes, as Python's syntax tree of a stub."""

from __future__ import annotations

import ast
import enum
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

ADDRESS: Final = "_Address"
"""The stubs' name for a device address, which signatures spell out."""

SHORT: Final = {
    f"{word}{bits}": f"{word[0].upper()}{bits}"
    for word in ("float", "int", "uint")
    for bits in (8, 16, 32, 64)
}
_IN_SIGNATURES: Final = (
    (r"typing\.SupportsInt \| typing\.SupportsIndex", "int"),
    (r"typing\.SupportsFloat \| typing\.SupportsIndex", "float"),
    (r"typing\.Annotated\[numpy\.typing\.ArrayLike, numpy\.(\w+)\]", lambda found: f"_{SHORT[found[1]]}"),
    (r"numpy\.typing\.NDArray\[numpy\.(\w+)\]", lambda found: f"_{SHORT[found[1]]}"),
    (r"numpy\.ndarray", "NDArray[Any]"),
    (r"collections\.abc\.", ""),
    (r"int \| Tensor \| None(?: = 0)?", lambda found: ADDRESS + (" = None" if "=" in found[0] else "")),
    (r"(: |-> )bytes\b", r"\1builtins.bytes"),  # several classes have a property of that name
    (r"twofold::", ""),
    (r": (?!_Address)([\w.]+) = None", r": \1 | None = None"),
    (r" = \[\]", " = ()"),
    (r"\b(list|dict)(?=[,)]| ?->|$| \|)", lambda found: f"{found[1]}[{'str, ' * (found[1] == 'dict')}Any]"),
)  # fmt: skip
"""pybind11's names of types, and the stubs'."""
_DOC_COLUMNS: Final = 105
_IS_BASE: Final = 1 << 10
"""Flag of classes from which Python may derive."""

Definition = ast.FunctionDef | ast.Assign | ast.AnnAssign | ast.ClassDef


def definitions(module: ModuleType) -> Iterator[Definition]:
    """Functions and classes of a module, in the order in which they were bound."""
    for name, value in vars(module).items():
        if name.startswith("_") or inspect.ismodule(value):
            continue
        yield _class(value) if inspect.isclass(value) else _function(name, value.__doc__, module.__name__)


def _class(native: type) -> ast.ClassDef:
    """A class with what it adds to its base; __init__ where Python may call it."""
    if issubclass(native, enum.IntEnum):
        members = "\n    ".join(f"{member.name} = {member.value}" for member in native)
        found = ast.parse(f"class {native.__name__}(IntEnum):\n    {members}").body[0]
        assert isinstance(found, ast.ClassDef)
        return found
    base = native.__bases__[0]
    bases = base.__name__ if base.__module__ == native.__module__ else ""
    found = ast.parse(f"class {native.__name__}({bases}): ...").body[0]
    assert isinstance(found, ast.ClassDef)
    if not native.__flags__ & _IS_BASE:
        found.decorator_list = [ast.Name("final")]
    members = [each for name, value in vars(native).items() for each in _member(native, name, value)]
    found.body = documented(_wrapped(native.__doc__ or "")) + members or found.body
    return found


def _member(native: type, name: str, value: Any) -> Iterator[Definition]:
    if name == "__init__":
        if not str(value.__doc__).startswith("Initialize self"):
            yield _function(name, value.__doc__, native.__module__)
    elif name.startswith("_") and name != "__len__":
        return
    elif isinstance(value, property):
        kind = _translated((value.fget.__doc__ or "").splitlines()[0].rpartition("-> ")[2], native.__module__)
        yield _annotated(name, kind if value.fset else f"Final[{kind}]")
        yield from documented(_wrapped(value.__doc__ or ""))
    else:
        is_static = isinstance(value, staticmethod)
        function = _function(name, (value.__func__ if is_static else value).__doc__, native.__module__)
        function.decorator_list = [ast.Name("staticmethod")] if is_static else []
        yield function


def _function(name: str, doc: str | None, module: str) -> ast.FunctionDef:
    """A function by the first line of its docstring. ValueError if that is no signature."""
    first, _, rest = (doc or "").partition("\n")
    try:
        found = ast.parse(f"def {_translated(first, module)}: ...").body[0]
    except SyntaxError as error:
        raise ValueError(f"{module}.{name} has no signature that Python reads: {first!r}") from error
    assert isinstance(found, ast.FunctionDef)
    arguments = [*found.args.posonlyargs, *found.args.args]
    if arguments and arguments[0].arg == "self":
        arguments[0].annotation = None
    found.body = documented(_wrapped(rest)) or found.body
    return found


def _translated(text: str, module: str) -> str:
    for pattern, usual in _IN_SIGNATURES:
        text = re.sub(pattern, usual, text)
    text = text.replace(f"{module}.", "")
    return re.sub(r"twofold\._core\.(device\.)?", lambda found: "launches." if found[1] else "_core.", text)


def _annotated(name: str, kind: str) -> ast.AnnAssign:
    found = ast.parse(f"{name}: {kind}").body[0]
    assert isinstance(found, ast.AnnAssign)
    return found


def _wrapped(doc: str) -> str:
    return "\n".join(textwrap.wrap(doc, _DOC_COLUMNS))


def documented(text: str) -> list[Any]:
    """A docstring as a statement; nothing for an empty one."""
    text = inspect.cleandoc(text).strip()
    return [ast.Expr(ast.Constant(text))] if text else []
