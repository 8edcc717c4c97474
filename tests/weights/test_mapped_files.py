"""Files of weights that change while they are mapped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from twofold import _core
from twofold.api.config import EngineConfig
from twofold.api.errors import KernelError, ModelLoadError, UnusableEngineError
from twofold.api.regular_file import open_regular
from twofold.api.types import SamplingParams
from twofold.engine import Engine
from twofold.weights.mapped_files import MappedFiles

from tests.tiny_models.writing import TinyModel, write_tiny_model

PAGE = 4096


def write_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    # A coarse clock of the file system may show the time of the first writing.
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def truncate(path: Path) -> None:
    os.truncate(path, PAGE)


def replace(path: Path) -> None:
    copy = path.with_suffix(".new")
    shutil.copy(path, copy)
    os.replace(copy, path)


CHANGES: list[tuple[Callable[[Path], None], str]] = [
    (write_in_place, "was written to"),
    (truncate, "4096 bytes now"),
    (replace, ""),
    (Path.unlink, ""),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_mapping_reports_what_happened_to_its_file(
    tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(3 * PAGE))
    mapping, other = _core.FileMapping(os.fsencode(file)), _core.FileMapping(os.fsencode(sys.executable))
    assert mapping.change() == ""
    change(file)
    assert (words in mapping.change()) if words else mapping.change() == ""
    assert other.change() == ""


def test_lost_bytes_read_as_zeros_and_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"\x07" * (3 * PAGE))
    mapping = _core.FileMapping(os.fsencode(file))
    seen = np.frombuffer(mapping, np.uint8)
    truncate(file)
    assert seen[0] == 7
    assert int(seen[PAGE:].sum()) == 0
    assert mapping.change() == f"{file} has become shorter or its disk failed"
    again = _core.FileMapping(os.fsencode(file))  # gets an entry of its own
    assert again.change() == ""


def test_unmapped_files_are_not_queried(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(PAGE))
    mapping = _core.FileMapping(os.fsencode(file))
    watched = MappedFiles([mapping])
    write_in_place(file)
    assert "was written to" in watched.change()
    del mapping
    assert watched.change() == ""


def test_a_lost_file_that_another_library_mapped_ends_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "other"
    file.write_bytes(bytes(2 * PAGE))
    program = f"""
import faulthandler, mmap, os
from twofold import _core
ours = _core.FileMapping(os.fsencode({sys.executable!r}))
mapped = mmap.mmap(os.open({str(file)!r}, os.O_RDONLY), 0, access=mmap.ACCESS_READ)
os.truncate({str(file)!r}, 0)
mapped[{PAGE}]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGBUS
    assert done.stderr.startswith("twofold: SIGBUS: a mapped file has become shorter or its disk failed")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("change", "words"), [*CHANGES[:1], (truncate, "become shorter"), *CHANGES[2:]])
def test_no_answer_is_computed_with_changed_weights(
    tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    model = write_tiny_model(tmp_path / "m", TinyModel())
    engine = Engine.load(EngineConfig(model=str(model), accelerator="none", cpu_threads=1))
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
    tokens: list[int] = []
    engine.generate([5, 6, 7], sampling, lambda chunk: tokens.extend(chunk.token_ids))
    change(model / "model.safetensors")
    again: list[int] = []
    if words:
        with pytest.raises(KernelError, match=words):
            engine.generate([200, 6, 7], sampling, lambda chunk: again.extend(chunk.token_ids))
        assert engine.failure is not None
        assert (engine.failure.state, engine.failure.code) == ("failed", "weights_changed")
        with pytest.raises(UnusableEngineError, match=words):  # no later request is accepted
            engine.generate([5, 6, 7], sampling)
        assert again == []
    else:
        engine.generate([5, 6, 7], sampling, lambda chunk: again.extend(chunk.token_ids))
        assert again == tokens
        assert engine.failure is None
    engine.close()


def test_a_pipe_or_a_device_in_place_of_a_file_is_an_error(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "m", TinyModel())
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        kept = (model / name).read_bytes()
        for kind in ("pipe", "device"):
            (model / name).unlink()
            os.mkfifo(model / name) if kind == "pipe" else (model / name).symlink_to("/dev/zero")
            with pytest.raises(ModelLoadError, match="regular file"):
                Engine.load(EngineConfig(model=str(model), accelerator="none", cpu_threads=1))
            (model / name).unlink()
            (model / name).write_bytes(kept)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
