"""Prompts with pictures on a device, run by the SIMT machine: logits are the CPU's but for what bf16 rounds."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import pytest
from twofold.api.media import PromptMedia
from twofold.models.config import has_bidirectional_pictures
from twofold.models.registry import read_config
from twofold.step.runner import Runner

from tests.device.runner_runs import F32, Play, make_cpu_runner, make_runner
from tests.engine.scripted_sampler import ScriptedSampler
from tests.tiny_models.picture_families import FAMILIES, VOCABULARY
from tests.tiny_models.pictures import encoder_of, picture, write_picture_model

TOKENS = 5
SIZES: Final[dict[str, dict[str, Any]]] = {
    "qwen3_5_moe": {
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10], "partial_rotary_factor": 0.25,
        },
    },
    "qwen3_vl_moe": {
        "head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10]},
    },
    # Tokens of pictures have experts of another size, some of them in slots.
    "ernie4_5_vl_moe": {
        "head_dim": 64, "moe_intermediate_size": [32, 16], "mlp_layer_types": ["sparse"] * 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 12, 8]},
    },
    # Tokens of a picture attend to one another in layers with a window.
    "gemma4_26b_a4b": {"head_dim": 64, "global_head_dim": 128, "num_hidden_layers": 4, "layer_types": None},
}  # fmt: skip


def logits_of(
    runner: Runner, prompts: list[tuple[list[int], PromptMedia | None]], *, bidirectional: bool = False
) -> F32:
    """Logits [prompts * TOKENS, vocabulary] of a fixed answer to each prompt."""
    script = np.random.default_rng(3).integers(3, 200, (len(prompts), TOKENS)).tolist()
    samplers = [ScriptedSampler(tokens) for tokens in script]
    Play(runner, max_batched_tokens=24, bidirectional=bidirectional).answer(
        [tokens for tokens, _ in prompts], samplers, TOKENS, media=[media for _, media in prompts]
    )
    return np.stack([row for sampler in samplers for row in sampler.seen])


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", SIZES)
def test_a_device_sees_what_the_cpu_sees(
    simt: ModuleType, tmp_path: Path, name: str, num_devices: int
) -> None:
    write_picture_model(tmp_path, name, seed=1, dtype="bfloat16", **SIZES[name])
    encoder, (before, after) = encoder_of(tmp_path), FAMILIES[name].around
    bidirectional = has_bidirectional_pictures(read_config(tmp_path).layers)
    sizes = enumerate([(40, 33), (33, 22), (22, 50)])
    pictures = encoder.pictures([encoder.prepared(picture(*size, n)) for n, size in sizes])

    def prompt(text: str, *which: int) -> tuple[list[int], PromptMedia | None]:
        for number in which:
            text = text.replace("[]", f"{before}{pictures[number].text}{after}", 1)
        ids = encoder.tokenizer(text)["input_ids"]
        if not which:
            return ids, None
        placed = encoder.placed(ids, [pictures[number] for number in which])
        return list(placed.token_ids), placed.media

    last = prompt("one [] ?", 1) if bidirectional else prompt("two [] [] ?", 1, 2)
    prompts = [prompt("a []", 0), prompt("no picture"), last]
    assert len(prompts[2][0]) < 90
    others = [{}] * (num_devices - 1)
    runner = make_runner(simt, tmp_path, slots=9, others=others, homes=(0, 0, 1, 1) if others else ())
    ours = logits_of(runner, prompts, bidirectional=bidirectional)
    expected = logits_of(make_cpu_runner(tmp_path), prompts, bidirectional=bidirectional)
    assert ours.shape == (len(prompts) * TOKENS, VOCABULARY)
    errors = np.linalg.norm(ours - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(errors) < 0.06
    if bidirectional:
        causal = logits_of(make_cpu_runner(tmp_path), prompts)
        assert np.linalg.norm(causal - expected) > 0.1 * np.linalg.norm(expected)
    blind = [(tokens, None) for tokens, _ in prompts]
    unseen = logits_of(make_cpu_runner(tmp_path), blind)
    seen = np.array([media is not None for _, media in prompts]).repeat(TOKENS)
    changed = np.linalg.norm(unseen - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(changed[seen]) > 0.2
