"""What is said of the machine and of the command."""

from __future__ import annotations

import sys

from peers import machine


def test_the_machine_is_described() -> None:
    told = machine.describe()
    assert told["cpu"]
    assert told["cores"] >= 1
    assert 0 < machine.available_memory_bytes() <= told["memory_gib"] * 2**30


def test_the_command_holds_no_directories(monkeypatch) -> None:
    words = [
        "/home/me/scripts/bench_peers.py",
        "--cache",
        "/mnt/big/cache",
        "--llama-python=/opt/x/bin/python",
        "--rounds",
        "5",
    ]
    monkeypatch.setattr(sys, "argv", words)
    said = "python scripts/bench_peers.py --cache …/cache --llama-python=…/python --rounds 5"
    assert machine.command_line() == said
