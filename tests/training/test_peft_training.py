"""Models that PEFT trains over our experts: losses and gradients are those of PEFT on transformers' own experts."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from twofold.api.errors import ModelLoadError
from twofold.training import enable, open_base

from tests.engine.model_runs import random_prompt
from tests.models.transformers_runs import one_torch_thread, reference
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import write_tiny_model

__all__ = ["one_torch_thread"]  # a fixture

peft = pytest.importorskip("peft")

FAMILIES = (
    *("qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss", "mixtral", "qwen3_next"),
    # Names that differ: transformers' conversions, our family table, encoders of images; and Llama 4's scaled rows.
    *("granitemoe", "lfm2_moe", "qwen3_vl_moe", "llama4"),
)
REFUSED = {
    "ernie4_5_vl_moe": r"has 4 modules of routed experts .* for 2 MoE layers",
    "step3p7": r"has 0 modules of routed experts whose implementation can be chosen",
    "minimax_m3": r"has the parameter .*\.mlp\.gate_up_proj\.weight, which the files lack",
}
OTHERS = [name for name, each in EXAMPLES.items() if each.has_experts and name not in (*FAMILIES, *REFUSED)]
SETTINGS = {
    "r": 4,
    "lora_alpha": 10,
    "target_modules": r".*\.(q_proj|v_proj|o_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|down_proj|in_proj_qkvz)",
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}
IDS = torch.tensor([random_prompt(48, 3), random_prompt(48, 4)])


def adapted(model: Any) -> Any:
    """`model` with an adapter whose factors depend on their names alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = peft.get_peft_model(model, peft.LoraConfig(**SETTINGS))
    generator = torch.Generator()
    for name, parameter in sorted(result.named_parameters()):
        if "lora_" in name:
            generator.manual_seed(sum(name.encode()))
            with torch.no_grad():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return result.train()


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_gradients_and_losses_are_those_of_peft(tmp_path: Path, family: str) -> None:
    enable()
    example = EXAMPLES[family]
    directory = write_tiny_model(tmp_path, example)
    config: Any = transformers.AutoConfig.from_pretrained(directory)
    has_images = type(config) not in transformers.AutoModelForCausalLM._model_mapping
    ours, theirs = adapted(open_base(directory).model), adapted(reference(directory, multimodal=has_images))
    assert trained(ours).keys() == trained(theirs).keys()
    optimisers = [torch.optim.AdamW(trained(model).values(), lr=1e-2) for model in (ours, theirs)]
    losses = []
    for step in range(6):
        of_step = []
        for model, optimiser in zip((ours, theirs), optimisers, strict=True):
            optimiser.zero_grad()
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            of_step.append(loss.item())
        if step == 0:
            for name, parameter in trained(theirs).items():
                expected, found = parameter.grad, trained(ours)[name].grad
                assert (expected is None) == (found is None), name
                if expected is None or found is None:
                    continue  # an encoder of images or sound
                error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
                assert error < 1e-4, f"{name}: {error:.1e}"
        for optimiser in optimisers:
            optimiser.step()
        losses.append(of_step)
    assert losses[-1][1] < losses[0][1] - 0.05, "nothing was learned, so the curves say nothing"
    for one, other in losses:
        assert abs(one - other) < 1e-3


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_a_gguf_file_is_a_base(tmp_path: Path, family: str) -> None:
    enable()
    directory = write_tiny_model(tmp_path / "model", EXAMPLES[family])
    file = write_tiny_gguf(tmp_path / "model.gguf", EXAMPLES[family])
    with torch.no_grad():
        ours, theirs = (
            model(input_ids=IDS).logits
            for model in (open_base(file, config=directory).model, reference(directory))
        )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    with pytest.raises(ModelLoadError, match=r"give the directory of the model's config\.json"):
        open_base(file)
    other = write_tiny_model(tmp_path / "other", replace(EXAMPLES[family], vocab_size=333))
    with pytest.raises(ModelLoadError, match="belongs to another model"):
        open_base(file, config=other)


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_cannot_be_trained_is_refused_by_a_line(tmp_path: Path, family: str) -> None:
    with pytest.raises(ModelLoadError, match=REFUSED[family]) as error:
        open_base(write_tiny_model(tmp_path, EXAMPLES[family]))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_experts_of_transformers_have_no_memory(tmp_path: Path, family: str) -> None:
    enable()
    model = open_base(write_tiny_model(tmp_path, EXAMPLES[family])).model
    stacks = [each for name, each in model.named_parameters() if "experts" in name]
    assert stacks
    assert all(each.untyped_storage().nbytes() <= 4 for each in stacks)


def test_an_adapter_may_be_switched_off_and_joined_with_another(tmp_path: Path) -> None:
    enable()
    directory = write_tiny_model(tmp_path, EXAMPLES["qwen3_moe"])
    found = []
    for base in (open_base(directory).model, reference(directory)):
        model = adapted(base)
        model.add_adapter("second", peft.LoraConfig(**SETTINGS | {"r": 2}))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                if ".second." in name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            model.eval()
            one = model(input_ids=IDS).logits
            with model.disable_adapter():
                none = model(input_ids=IDS).logits
            model.base_model.set_adapter(["default", "second"])
            both = model(input_ids=IDS).logits
        found.append((one, none, both))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert (found[1][0] - found[1][2]).abs().max() > 0.01
