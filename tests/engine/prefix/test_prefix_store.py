"""Prefixes on disk: found after a restart, never believed where they are damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from twofold.engine.prefix import cache as prefix_cache
from twofold.engine.prefix.store import PrefixStore

from tests.engine.prefix.play import Play


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enables snapshots for prompts as short as these."""
    monkeypatch.setattr(prefix_cache, "SNAPSHOT_INTERVAL", 16)
    monkeypatch.setattr(prefix_cache, "_MIN_TOKENS_PER_SPLIT", 8)
    monkeypatch.setattr(prefix_cache, "_MIN_TOKENS_PER_SNAPSHOT", 3)


def found_after_a_restart(directory: Path, *, with_records: bool = False, **changes: Any) -> int:
    """Cache hits among the 30 tokens of a prompt and its answer's first token, after a restart."""
    sizes: dict[str, Any] = {"num_records": 2, "num_snapshots": 4} if with_records else {}
    play = Play(**(sizes | {"directory": directory} | changes))
    again = play.add([*range(30), 0, 1, 2])
    play.run()
    play.pool.close()
    return again.num_cached


@pytest.mark.parametrize("with_records", [False, True])
def test_a_restart_finds_what_was_there(tmp_path: Path, with_records: bool) -> None:
    sizes: dict[str, Any] = {"num_records": 2, "num_snapshots": 4} if with_records else {}
    play = Play(directory=tmp_path, **sizes)
    play.add(range(30), 2)
    play.run()
    play.pool.close()
    assert found_after_a_restart(tmp_path, with_records=with_records, key=b"another model") == 0
    assert found_after_a_restart(tmp_path, with_records=with_records) == 31
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["cut", "turned", "longer", "empty", "swapped", "gone"])
def test_a_damaged_file_and_all_after_it_are_dropped_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    play = Play(directory=tmp_path)
    sequence = play.add(range(30), 2)
    play.run()
    play.pool.close()
    path, other = (tmp_path / f"{sequence.digests[number].hex()}.page" for number in (4, 2))
    whole = path.read_bytes()
    turned = bytes([*whole[:-1], whole[-1] ^ 1])
    left = {
        "cut": whole[:-1],
        "turned": turned,
        "longer": whole + b"x",
        "empty": b"",
        "swapped": other.read_bytes(),
    }
    if damage == "gone":
        play = Play(directory=tmp_path)  # it was there when this one began
        path.unlink()
        again = play.add([*range(30), 0, 1, 2])
        play.run()
        play.pool.close()
        assert again.num_cached == 16
    else:
        path.write_bytes(left[damage])
        (tmp_path / "notes.page").write_text("not a page")
        assert found_after_a_restart(tmp_path) == 16
        assert (tmp_path / "notes.page").exists()
    assert path.name in caplog.text
    assert found_after_a_restart(tmp_path) == 32, "it was rewritten, and the one after it"


def test_prefixes_evicted_from_memory_are_read_from_disk(tmp_path: Path) -> None:
    play = Play(num_pages=9, directory=tmp_path)
    for begin in (0, 100, 200):
        play.add(range(begin, begin + 20), 2)
        play.run()
    store = play.pool._disk._store
    with store._changed:  # it is written in the background
        assert store._changed.wait_for(lambda: store._waiting_bytes == 0, 60)
    first = play.add(range(21))
    play.run()
    assert first.num_cached == 20
    play.pool.close()


def test_of_two_processes_one_writes(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, 1 << 20)
    with pytest.raises(BlockingIOError):
        PrefixStore(tmp_path, 1 << 20)
    store.close()
    PrefixStore(tmp_path, 1 << 20).close()


def test_a_full_disk_costs_what_would_have_been_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    play = Play(directory=tmp_path)
    play.add(range(30), 2)
    play.run()
    monkeypatch.setattr("os.replace", fail)
    play.pool.close()
    assert "No space left on device" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
