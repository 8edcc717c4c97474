"""Unchanged programs of TRL and LLaMA-Factory have over our experts the loss curves that they have without us."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from tests.training import loss_curves


@pytest.mark.slow
@pytest.mark.parametrize("family", loss_curves.FAMILIES)
@pytest.mark.parametrize("program", loss_curves.LIBRARIES)
def test_curves_are_those_of_peft(program: str, family: str, tmp_path: Path) -> None:
    variable = f"TWOFOLD_TEST_PYTHON_{program.upper().replace('-', '_')}"
    python = os.environ.get(variable)
    package = loss_curves.LIBRARIES[program]
    if (program, family) in loss_curves.LACKING:
        pytest.skip(loss_curves.LACKING[program, family])
    if python is None and importlib.util.find_spec(package) is None:
        pytest.skip(
            f"{package} is not installed; {variable} may name the interpreter of an environment that has it"
        )
    pair = loss_curves.curves(program, family, python or sys.executable, tmp_path)
    # DPO begins at log 2, so little is left to fall.
    assert pair["ours"][-1] < pair["ours"][0] - 0.1, "nothing was learned, so the curves say nothing"
    assert loss_curves.difference(pair) <= loss_curves.TOLERANCE


def test_the_documented_curves_are_within_the_tolerance() -> None:
    documented = json.loads(loss_curves.DATA.read_text())
    assert list(documented) == list(loss_curves.LIBRARIES)
    for program, of_families in documented.items():
        possible = [each for each in loss_curves.FAMILIES if (program, each) not in loss_curves.LACKING]
        assert list(of_families) == possible, program
        assert max(map(loss_curves.difference, of_families.values())) <= loss_curves.TOLERANCE, program
