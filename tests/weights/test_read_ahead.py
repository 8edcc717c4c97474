"""Reading ahead reads all it is asked for, and never fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from twofold.weights.read_ahead import ReadAhead


def test_reads_every_stretch_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(10 << 20))
    read: list[tuple[int, int]] = []
    preadv = os.preadv

    def spy(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        num_bytes = preadv(descriptor, buffers, offset)
        read.append((offset, num_bytes))
        return num_bytes

    monkeypatch.setattr(os, "preadv", spy)
    ahead = ReadAhead()
    ahead.request(file, 9 << 20, 10 << 20)
    ahead.request(file, 100, 9 << 20)
    ahead.wait()
    assert read[0] == (9 << 20, 1 << 20)
    position = 100
    for offset, num_bytes in read[1:]:
        assert offset == position
        position += num_bytes
    assert position == 9 << 20


def test_unreadable_entries_are_kept(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"123")
    ahead = ReadAhead()
    for file in (tmp_path / "missing", tmp_path, short):
        ahead.request(file, 0, 1 << 20)
    ahead.wait()
    ahead.request(short, 0, 3)  # a new thread after the last one ended
    ahead.wait()
