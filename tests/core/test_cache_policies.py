"""The registry of cache policies: its entries, where they are shown, and that no other code names a policy."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from twofold import _core
from twofold.tools.cli.main import main

ENGINE = Path(__file__).resolve().parents[2] / "engine"
POLICIES = {policy.name: policy for policy in _core.cache_policies()}
SHOWN = {
    # name: (offline, pooled, prefetches)
    "payback": (False, True, "auto"),
    "lru": (False, False, "asked"),
    "lfu": (False, False, "asked"),
    "lfru": (False, False, "asked"),
    "mrs": (False, False, "asked"),
    "two-in-eight": (False, False, "asked"),
    "frequency-lru": (False, False, "asked"),
    "pinned-lru": (False, True, "asked"),
    "half-lru": (False, True, "asked"),
    "static": (False, False, "never"),
    "belady": (True, False, "asked"),
    "oracle-payback": (True, False, "asked"),
}


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit):
        main([*command, "--help" if command[0] == "lab" else "--help-all"])
    return "".join(capsys.readouterr().out.split())  # lines break at hyphens too


def line(policy: _core.CachePolicy) -> str:
    return "".join(f"{policy.name}: {policy.help}".split())


def test_the_registry_describes_each_policy() -> None:
    assert {p.name: (p.offline, p.pooled, p.prefetches) for p in POLICIES.values()} == SHOWN
    assert all(len(policy.help) > 10 for policy in POLICIES.values())


def test_an_entry_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        POLICIES["payback"].offline = True  # type: ignore[misc]


@pytest.mark.parametrize("command", ["serve", "generate", "bench"])
def test_serving_lists_online_policies_with_their_help(capsys, command) -> None:
    text = help_of(capsys, command)
    assert [p.name for p in POLICIES.values() if line(p) in text] == [
        p.name for p in POLICIES.values() if not p.offline
    ]


def test_the_lab_offers_all(capsys) -> None:
    text = help_of(capsys, "lab", "replay")
    assert [p.name for p in POLICIES.values() if line(p) not in text] == []
    assert ",".join(POLICIES) in help_of(capsys, "lab", "simulate")


def compared_names(source: str) -> set[str]:
    """Policies that Python code compares something with."""
    compared = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare | ast.MatchValue)
    ]
    constants = (each for node in compared for each in ast.walk(node) if isinstance(each, ast.Constant))
    return {str(constant.value) for constant in constants} & POLICIES.keys()


def test_no_code_decides_by_a_policys_name() -> None:
    named = "|".join(POLICIES)
    wrong = {path.name: compared_names(path.read_text()) for path in ENGINE.rglob("*.py")}
    for path in (*ENGINE.rglob("*.cpp"), *ENGINE.rglob("*.h")):
        wrong[path.name] = set(re.findall(rf'[!=]= *"({named})"', path.read_text()))
    assert {name: found for name, found in wrong.items() if found} == {}
    assert compared_names('x = a if config.policy == "lru" else b') == {"lru"}
