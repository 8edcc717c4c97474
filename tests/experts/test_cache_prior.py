"""Cache-aware routing on the CPU: the bound that ops/router.h names, and where it may change nothing."""

from __future__ import annotations

import numpy as np
import pytest
from twofold import _core
from twofold.blocks import ops
from twofold.experts.profiles import load_profile
from twofold.experts.slot_plan import SlotPlan
from twofold.models import open_model_files
from twofold.tools.lab.decoded_text import DecodedText

from tests.engine.model_runs import random_prompt
from tests.tiny_models.writing import TinyModel, write_tiny_model

TOP_K, EXPERTS, LAYERS = 3, 16, 3
PRIOR = 0.4
HIT = int(_core.Placement.__members__["HIT"])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> DecodedText:
    # Weights are the scores themselves.
    tiny = TinyModel(num_experts=EXPERTS, top_k=TOP_K, num_layers=LAYERS, norm_topk_prob=False)
    files = open_model_files(write_tiny_model(tmp_path_factory.mktemp("model"), tiny))
    return DecodedText(files, [random_prompt(40, seed) for seed in (1, 2)], ops.ThreadPool(1))


def test_it_uses_residents_only_and_never_beyond_its_bound(text: DecodedText) -> None:
    profile = load_profile("rtx4090-pcie4")
    plain, favoured = (
        text.token_by_token(profile, SlotPlan(12, "payback", options={"cache_prior": prior}))
        for prior in (0.0, PRIOR)
    )
    assert favoured.hit_rate > plain.hit_rate + 0.02
    assert plain.events is not None
    assert favoured.events is not None
    changed = 0
    # The first router's input is the same in both.
    for before, after in zip(plain.events[:, 0], favoured.events[:, 0], strict=True):
        own, taken = ({e: k for k, e in enumerate(row["experts"][:TOP_K])} for row in (before, after))
        new, lost = taken.keys() - own.keys(), own.keys() - taken.keys()
        changed += bool(new)
        for expert in new:
            assert after["placement"][taken[expert]] == HIT
            score = after["weights"][taken[expert]]
            assert score >= (1 - PRIOR) * max(before["weights"][own[e]] for e in lost) * (1 - 1e-6)
        for expert in own.keys() & taken.keys():
            assert before["weights"][own[expert]] == after["weights"][taken[expert]]
    assert changed > 5


@pytest.mark.parametrize(("num_slots", "prior"), [(12, 0.0), (LAYERS * EXPERTS, 0.4), (0, 0.4)])
def test_it_changes_no_bit_where_it_is_off_or_favours_all_or_none(
    text: DecodedText, num_slots: int, prior: float
) -> None:
    placed = text.token_by_token(
        load_profile("rtx4090-pcie4"), SlotPlan(num_slots, "payback", options={"cache_prior": prior})
    )
    for ours, source in zip(placed.logits, text.at_once().logits, strict=True):
        assert np.array_equal(ours, source)
