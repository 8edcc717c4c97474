"""Gradients of experts in every weight format, against torch in float64 with the dequantised weights."""

from __future__ import annotations

import numpy as np
import pytest
from packed_reference import FORMATS, random_rows
from twofold.weights.weight_format import WeightMatrix

from tests.training.expert_cases import by_torch, case_of, run


def matrix(draw: np.random.Generator, format: str, rows: int, columns: int) -> WeightMatrix:
    return random_rows(draw, format, rows, columns).matrix()


@pytest.mark.slow
@pytest.mark.parametrize("format", sorted(FORMATS))
def test_gradients_of_a_format_are_those_of_torch(format: str) -> None:
    case = case_of((format,) * 3, make=matrix)
    for ours, theirs in zip(run(case), by_torch(case), strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 1e-4
