"""Runs a training script whose MoE models load over our experts.

python -m twofold.training SCRIPT ARGUMENTS…
python -m twofold.training -m MODULE ARGUMENTS…
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_USAGE: Final = "usage: python -m twofold.training (SCRIPT | PROGRAM | -m MODULE) [ARGUMENTS ...]"
_HOOKED: Final = "transformers.modeling_utils"


class _OnImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Hooks `from_pretrained` when the script imports transformers.

    An import of ours before it would read environment variables that the script sets, as HF_HOME, too early.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != _HOOKED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        from twofold.training.enabling import register_experts
        from twofold.training.loading import hook_from_pretrained

        hook_from_pretrained(module.PreTrainedModel, prepare=register_experts)


def main(words: Sequence[str]) -> None:
    """Run the script named by `words`, as the interpreter would."""
    is_module = words[:1] == ["-m"]
    rest = list(words[1:] if is_module else words)
    if not rest or rest[0].startswith("-"):
        asked = rest[:1] in (["-h"], ["--help"])
        print(_USAGE, file=sys.stdout if asked else sys.stderr)
        raise SystemExit(0 if asked else 2)
    sys.meta_path.insert(0, _OnImport())
    if is_module:
        sys.argv = rest
        sys.path[0] = os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    script = _script(rest[0])
    sys.argv = [str(script), *rest[1:]]
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


def _script(name: str) -> Path:
    """A file, or a program written in Python that is on PATH, as `llamafactory-cli`."""
    if Path(name).is_file():
        return Path(name)
    beside = shutil.which(name, path=str(Path(sys.executable).parent))
    found = beside or shutil.which(name)
    if found is not None:
        with open(found, "rb") as stream:
            first = stream.readline()
        if first.startswith(b"#!") and b"python" in first:
            return Path(found)
    reason = "is no file, and no program in Python on PATH" if found is None else "is not written in Python"
    print(f"python -m twofold.training: {name} {reason}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
