"""The loops that find out what a core can do at most."""

from __future__ import annotations

import pytest
from twofold._core.testing import kernels


def test_every_cpu_multiplies_floats() -> None:
    assert "f32" in kernels.peak_kinds()


@pytest.mark.parametrize("kind", kernels.peak_kinds())
def test_operations_grow_with_the_rounds(kind: str) -> None:
    once = kernels.peak_operations(kind, 1)
    # Twelve products of at least one multiplication and one addition.
    assert once >= 24
    assert kernels.peak_operations(kind, 1000) == 1000 * once
    assert kernels.peak_operations(kind, 0) == 0


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="no such kind"):
        kernels.peak_operations("f128", 1)
