"""Files that a user names: a pipe, a device or a directory in their place is one line and no endless wait."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from twofold.api.config import ServerConfig
from twofold.api.errors import TwofoldError
from twofold.api.regular_file import read_regular, read_regular_text
from twofold.experts.expert_statistics import read_statistics
from twofold.experts.placement_files import read_placement
from twofold.experts.profiles import load_profile
from twofold.hub.cache import RepoFolder
from twofold.quantise.texts import read_text
from twofold.rules.yaml_file import read_yaml
from twofold.server.listening import certificate_of
from twofold.text.tokenizer import ChatTemplate
from twofold.tools.lab.trace import load_trace


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def directory(path: Path) -> None:
    path.mkdir()


def certificate(path: Path) -> Any:
    return certificate_of(ServerConfig(ssl_certfile=str(path), ssl_keyfile=str(path)))


def template(path: Path) -> Any:
    return ChatTemplate.find(path.parent, {}, {})


READERS: dict[str, Callable[[Path], Any]] = {
    "profile.json": lambda path: load_profile(str(path)),
    "rules.yaml": read_yaml,
    "text.txt": lambda path: read_text(str(path)),
    "placement.npz": read_placement,
    "statistics.npz": lambda path: read_statistics(path, 1, 1),
    "statistics.pt": lambda path: read_statistics(path, 1, 1),
    "trace.npz": load_trace,
    "certificate.pem": certificate,
    "chat_template.jinja": template,
    "chat_template.json": template,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("make", [pipe, device, directory])
def test_something_else_in_place_of_a_file_is_one_line(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    path = tmp_path / name
    make(path)
    with pytest.raises(TwofoldError) as caught:
        READERS[name](path)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("make", [pipe, device, directory])
def test_something_else_in_a_cache_counts_as_missing(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "refs").mkdir()
    make(tmp_path / "refs" / "main")
    assert RepoFolder(tmp_path).commit_of("main") is None


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcd")
    assert read_regular(path, 4) == (b"abcd", 4)
    assert read_regular(path, 3) == (b"", 4)
    assert read_regular_text(path, 4) == "abcd"
    with pytest.raises(OSError, match="it has 4 bytes, expected at most 3"):
        read_regular_text(path, 3)
    # Files of /proc have the size 0.
    data, size = read_regular(Path("/proc/self/status"), 1 << 20)
    assert len(data) == size > 0
    assert read_regular(Path("/proc/self/status"), 10) == (b"", 11)
