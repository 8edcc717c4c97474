"""Several adapters with scales are one adapter that changes each matrix by the weighted sum."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from twofold.adapters.weighted_sum import weighted_sum
from twofold.api.errors import ModelLoadError

from tests.adapters.adapter_files import LAYER, PREFIX, changes, factors, numbers, read

Q, O = f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.o_proj"  # noqa: E741


def test_the_change_of_a_sum_is_the_sum_of_changes(tmp_path: Path) -> None:
    one = read(tmp_path / "one", factors(Q, 8, 6) | factors(O, 6, 8))
    other = read(tmp_path / "other", factors(Q, 8, 6, rank=3), r=3)
    total = weighted_sum([(one, 0.5), (other, -2.0)], "both")
    wanted = changes(one), changes(other)
    np.testing.assert_allclose(changes(total)[Q], 0.5 * wanted[0][Q] - 2 * wanted[1][Q], rtol=1e-6)
    np.testing.assert_array_equal(changes(total)[O], np.float32(0.5) * wanted[0][O])
    assert (total.name, total.max_rank) == ("both", 5)
    digests = {weighted_sum([(one, a), (other, b)], "").digest for a, b in ((1, 1), (1, 2), (2, 1))}
    assert len(digests) == 3, "prefix-cache pages of different sums would be shared"


def test_an_adapter_with_whole_matrices_is_not_scaled(tmp_path: Path) -> None:
    whole = {f"{PREFIX}lm_head.weight": numbers(10, 6)}
    adapter = read(tmp_path, factors(Q, 8, 6) | whole, modules_to_save=["lm_head"])
    with pytest.raises(ModelLoadError, match="replaces lm_head; use it alone, with scale 1"):
        weighted_sum([(adapter, 0.5)], "half")
