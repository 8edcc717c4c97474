"""Every key of every family, deleted, null or under another name, means what transformers makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.engine.model_runs import load
from tests.models.published.config_sweep import MODELS, as_json, changes, ours, stays_null, whole_config
from tests.models.transformers_runs import PROMPT, one_torch_thread, reference_logits, reference_of
from tests.tiny_models.writing import tiny_config, write_tiny_model

__all__ = ["one_torch_thread"]  # a fixture

# A family of each way to read keys.
OFTEN = (
    "mimo_v2_flash",
    "deepseek_v3",
    "qwen3_vl_moe",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "mixtral",
    "step3p7",
)
NULLS_OFTEN = ("mimo_v2_flash", "axk1", "mistral", "ernie4_5_moe")
# A tie of the text part counts where the outer part has none; a head that is in the files is read in any case.
# transformers declares a name of Step's experts and then does not read it, so that the weights do not fit.
# DeepSeek-OCR-2's class computes the size of a head, whatever the file says.
UNEQUAL = {
    ("deepseek_ocr2", "hidden_size deleted"),
    ("step3p7", "n_routed_experts as num_local_experts"),
    ("qwen3_vl_moe", "tie_word_embeddings deleted"),
    ("ernie4_5_vl_moe", "tie_word_embeddings deleted"),
}


def _mostly_slow(often: tuple[str, ...]) -> list[object]:
    return [pytest.param(name, marks=() if name in often else pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("family", _mostly_slow(OFTEN))
def test_a_changed_file_means_what_transformers_makes_of_it(family: str) -> None:
    config = json.loads(json.dumps(tiny_config(MODELS[family])))
    compared, unequal = 0, []
    for change, changed in changes(config):
        try:
            whole = whole_config(changed)
        except Exception:  # of any kind: transformers refuses the file, so it means nothing
            continue
        compared += 1
        if ours(changed) != ours(as_json(whole, config)) and (family, change) not in UNEQUAL:
            unequal.append(change)
    assert unequal == []
    assert compared > 15


@pytest.mark.parametrize("family", _mostly_slow(NULLS_OFTEN))
def test_logits_with_a_null_that_stays_are_transformers(tmp_path: Path, family: str) -> None:
    """null that its class keeps is for the model to read: false, none, or a failure."""
    model = MODELS[family]
    directory = write_tiny_model(tmp_path, model)
    config = json.loads((directory / "config.json").read_text())
    for change, changed in changes(config):
        try:
            if not stays_null(change, whole_config(changed)):
                continue
            (directory / "config.json").write_text(json.dumps(changed))
            expected = reference_logits(reference_of(model, directory), PROMPT)
        except Exception:  # of any kind: transformers cannot run it
            continue
        if change == "q_lora_rank null":  # transformers makes up the matrix that the files lack
            continue
        runner = load(directory)
        got = runner.logits(runner.prefill(PROMPT)[1])
        assert np.abs(got - expected).max() < 1e-4, change
