"""Models with LoRA adapters that PEFT made: logits equal PEFT's, and a sequence's bits do not depend on the others'."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from twofold.adapters.reading import read_adapter

from tests.engine.adapter_files import adapters_of
from tests.engine.model_runs import Runner, load, random_prompt
from tests.models.transformers_runs import one_torch_thread, reference, reference_logits
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import write_tiny_model

__all__ = ["one_torch_thread"]  # a fixture

peft = pytest.importorskip("peft")

F32 = npt.NDArray[np.float32]
PROMPT = random_prompt(40)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MODULES = (
    r".*\.(q_proj|k_proj|v_proj|o_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|gate_proj|up_proj|down_proj"
    r"|in_proj_qkv|in_proj_z|in_proj_qkvz|out_proj)"
)
ENDS = ["q_proj", "embed_tokens", "lm_head"]
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"target_modules": MODULES, "target_parameters": EXPERTS}),
    "qwen2_moe": ("qwen2_moe", {"target_modules": MODULES, "target_parameters": EXPERTS}),
    "mixtral": ("mixtral", {"target_modules": MODULES, "target_parameters": EXPERTS}),
    "gpt_oss": ("gpt_oss", {"target_modules": MODULES, "target_parameters": EXPERTS}),
    "deepseek_v3": ("deepseek_v3", {"target_modules": MODULES, "target_parameters": EXPERTS}),
    "qwen3_next": ("qwen3_next", {"target_modules": MODULES, "target_parameters": EXPERTS}),
    "ends": ("qwen3_moe", {"target_modules": ENDS}),
    "whole ends": ("qwen3_moe", {"target_modules": ["k_proj"], "modules_to_save": ENDS[1:]}),
}


def train(model: Any, directory: Path, seed: int, settings: Mapping[str, Any]) -> Any:
    """`model` with an adapter of random factors, saved to `directory`."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=3 + seed, lora_alpha=6, **settings))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.1)
                elif "modules_to_save" in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        adapted.save_pretrained(directory)
    return adapted.eval()


def hidden_of(runner: Runner, *parts: tuple[int, Sequence[int]], chunk: int = 64) -> list[F32]:
    """Hidden states of whole prompts, each with its adapter (-1: none), prefilled together in chunks."""
    sequences = [runner.sequence(len(ids)) for _, ids in parts]
    found: list[list[F32]] = [[] for _ in parts]
    for begin in range(0, max(len(ids) for _, ids in parts), chunk):
        step = [
            (index, ids[begin : begin + chunk]) for index, (_, ids) in enumerate(parts) if len(ids) > begin
        ]
        runner.model.adapters.set([parts[index][0] for index, ids in step for _ in ids])
        outputs = runner.step(*((sequences[index], ids) for index, ids in step))
        for (index, _), output in zip(step, outputs, strict=True):
            found[index].append(output)
    return [np.concatenate(each) for each in found]


def logits_of(runner: Runner, hidden: F32, number: int) -> F32:
    runner.model.adapters.set([number] * len(hidden))
    return runner.logits(hidden)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(tmp_path: Path, case: str) -> None:
    family, settings = CASES[case]
    directory = write_tiny_model(tmp_path / "model", EXAMPLES[family])
    runner = load(directory, num_sequences=12)
    adapters, expected = adapters_of(runner), {-1: reference_logits(reference(directory), PROMPT)}
    for number in (0, 1):
        path = tmp_path / f"adapter-{number}"
        expected[number] = reference_logits(train(reference(directory), path, number, settings), PROMPT)
        adapters.put(number, adapters.prepare(read_adapter(path, adapters.shapes, name=str(number))))
    alone = {number: hidden_of(runner, (number, PROMPT))[0] for number in expected}
    for number, wanted in expected.items():
        bound = 1e-4 * max(1.0, float(np.abs(wanted).max()) / 16)
        np.testing.assert_allclose(logits_of(runner, alone[number], number), wanted, rtol=0, atol=bound)
        if number >= 0:
            assert np.abs(wanted - expected[-1]).max() > 0.05, "the adapter changes next to nothing"

    together = hidden_of(runner, *((number, PROMPT) for number in expected), chunk=7)
    for number, hidden in zip(expected, together, strict=True):
        np.testing.assert_array_equal(hidden, alone[number])
    adapters.drop(0)
    np.testing.assert_array_equal(hidden_of(runner, (-1, PROMPT))[0], alone[-1])
    np.testing.assert_array_equal(hidden_of(runner, (1, PROMPT))[0], alone[1])
