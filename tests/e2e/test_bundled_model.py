"""The bundled model, read by transformers alone: what is in its files, and that it tells a tale and stops."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = Path(__file__).resolve().parents[2] / "models" / "twofold-tales"
LAYERS, EXPERTS, HIDDEN, INNER = 6, 32, 256, 64

# Written for this test, in the manner of the books that the model has read.
EXCERPT = """Once upon a time there was a miller who had three daughters and a grey donkey. The eldest was \
proud, the second was idle, but the youngest got up before the sun and carried the flour to the town. One \
morning, as she came to the bridge, an old woman sat there and wept bitterly.

'Good mother,' said the girl, 'why do you weep?'

'Because I am hungry,' answered the old woman, 'and no one will give me so much as a crust of bread.'

Then the girl took the loaf out of her basket, broke it in two, and gave her the larger half. 'You have a \
kind heart,' said the old woman, 'and you shall not repent it. When you come to the king's castle, ask for \
the rusty key that hangs behind the door, and for nothing else.'"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def test_files_are_small_enough_to_ship() -> None:
    assert (MODEL / "model.safetensors").stat().st_size <= 28_000_000
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    ):
        assert 0 < (MODEL / name).stat().st_size < 1_000_000


def test_tensors_have_the_names_of_published_checkpoints() -> None:
    expected = {"model.embed_tokens.weight": [4096, HIDDEN], "model.norm.weight": [HIDDEN]}
    prediction = f"model.layers.{LAYERS}"
    expected |= {f"{prediction}.{name}.weight": [HIDDEN] for name in ("enorm", "hnorm", "shared_head.norm")}
    expected[f"{prediction}.eh_proj.weight"] = [HIDDEN, 2 * HIDDEN]
    for layer in range(LAYERS + 1):
        prefix = f"model.layers.{layer}"
        expected |= {
            f"{prefix}.input_layernorm.weight": [HIDDEN],
            f"{prefix}.post_attention_layernorm.weight": [HIDDEN],
            f"{prefix}.self_attn.q_proj.weight": [256, HIDDEN],
            f"{prefix}.self_attn.k_proj.weight": [128, HIDDEN],
            f"{prefix}.self_attn.v_proj.weight": [128, HIDDEN],
            f"{prefix}.self_attn.o_proj.weight": [HIDDEN, 256],
            f"{prefix}.self_attn.q_norm.weight": [64],
            f"{prefix}.self_attn.k_norm.weight": [64],
            f"{prefix}.mlp.gate.weight": [EXPERTS, HIDDEN],
        }
        for expert in range(EXPERTS):
            expected[f"{prefix}.mlp.experts.{expert}.gate_proj.weight"] = [INNER, HIDDEN]
            expected[f"{prefix}.mlp.experts.{expert}.up_proj.weight"] = [INNER, HIDDEN]
            expected[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = [HIDDEN, INNER]
    with safe_open(MODEL / "model.safetensors", framework="pt") as weights:
        assert {name: weights.get_slice(name).get_shape() for name in weights.keys()} == expected  # noqa: SIM118
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118


def test_every_ending_token_ends_generation(tokenizer: Any) -> None:
    ends = {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")}
    for name in ("config.json", "generation_config.json"):
        assert set(json.loads((MODEL / name).read_text(encoding="utf-8"))["eos_token_id"]) == ends


def test_tokenizer_gives_back_any_text(tokenizer: Any) -> None:
    text = EXCERPT + "\n\n  Ærø – naïve – 龍 🐉\ttabs\r\nand  spaces "
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_chat_template_writes_chatml(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len([token for token in tokenizer(rendered).input_ids if token < 3]) == 5


@pytest.mark.parametrize(
    "prompt",
    [
        "Tell me the story of the princess and the dragon.",
        "Tell me the story of the cat and the mouse.",
        pytest.param(
            "Continue: A poor woodcutter lived with his wife and children at the edge of a great forest.",
            marks=pytest.mark.slow,
        ),
        "Hello!",
    ],
)
def test_greedy_answers_stop_at_an_end_token(model: Any, tokenizer: Any, prompt: str) -> None:
    """Prompts that these weights are known to end on: under greedy decoding some others run into a loop."""
    messages = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        output = model.generate(**encoded, max_new_tokens=1500, do_sample=False, temperature=None, top_p=None)
    answer = output[0, encoded["input_ids"].shape[1] :].tolist()
    assert answer[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert len(tokenizer.decode(answer, skip_special_tokens=True).split()) >= 3


def test_bits_per_byte_of_a_tale_it_has_never_seen(model: Any, tokenizer: Any) -> None:
    start = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    ids = torch.tensor([[start, *tokenizer(EXCERPT).input_ids]])
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0]
    nats = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    assert 0.5 < nats / math.log(2) / len(EXCERPT.encode("utf-8")) < 1.9
