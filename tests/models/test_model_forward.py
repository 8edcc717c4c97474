"""The forward pass against transformers, over the odd corners of the configurations.

Both load the same directory. transformers runs in float32 with plain ("eager") attention and experts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from twofold.models import read_config
from twofold.models.bundled import bundled_model_path
from twofold.text.tokenizer import Tokenizer

from tests.engine.model_runs import load, random_prompt, rounds_activations
from tests.models.transformers_runs import one_torch_thread, reference, reference_greedy, reference_logits
from tests.tiny_models.table import EXAMPLES, tiny
from tests.tiny_models.writing import TinyModel, write_tiny_model

__all__ = ["one_torch_thread"]  # a fixture

QWEN = TinyModel()
MIXTRAL = TinyModel(architecture="MixtralForCausalLM")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

OF_LATENTS = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
V3 = tiny("deepseek_v3", num_experts=8, top_k=2, rope_scaling=None, routed_scaling_factor=1.0)
V2 = tiny("deepseek_v2", q_lora_rank=20, rope_scaling=None)
LATENT: dict[str, TinyModel] = {
    "v3": V3,
    "v3-plain-queries": V3.changed(q_lora_rank=None),
    "v3-groups": EXAMPLES["deepseek_v3"],
    "v3-one-group-of-two": V3.changed(num_experts=6, n_group=3, topk_group=1),
    "v3-raw-weights": V3.changed(norm_topk_prob=False, routed_scaling_factor=1.7),
    "v3-yarn": V3.changed(rope_scaling=OF_LATENTS, rope_form="rope_scaling"),
    "v3-yarn-mscale": V3.changed(rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}),
    "v3-yarn-without-mscale": V3.changed(rope_scaling=YARN),
    "v3-halves": V3.changed(rope_interleave=False, rope_scaling=OF_LATENTS),
    "v3-bias": V3.changed(attention_bias=True),
    "v3-bias-plain-queries": V3.changed(attention_bias=True, q_lora_rank=None),
    "v3-no-dense": V3.changed(first_k_dense_replace=0, num_layers=2),
    "v3-mostly-dense-tied": V3.changed(num_layers=4, first_k_dense_replace=3, tie_word_embeddings=True),
    "v3-odd-sizes": V3.changed(
        num_heads=7, num_kv_heads=7, hidden_size=35, q_lora_rank=9, kv_lora_rank=33, qk_nope_head_dim=5,
        qk_rope_head_dim=2, v_head_dim=3, moe_intermediate_size=19, vocab_size=321, num_shards=2,
    ),
    "v3-values-wider-than-latents": V3.changed(kv_lora_rank=6, v_head_dim=20, num_heads=2, num_kv_heads=2),
    "v2": V2,
    "v2-lite": V2.changed(q_lora_rank=None, n_shared_experts=2, top_k=3, num_experts=9),
    "v2-groups": V2.changed(
        num_experts=12, n_group=3, topk_group=2, top_k=4, routed_scaling_factor=16.0, n_shared_experts=3,
        topk_method="group_limited_greedy",
    ),
    "v2-yarn": EXAMPLES["deepseek_v2"],
    "v2-everything": V2.changed(
        num_layers=4, num_heads=6, num_kv_heads=6, hidden_size=42, q_lora_rank=14, kv_lora_rank=18, qk_nope_head_dim=6,
        qk_rope_head_dim=10, v_head_dim=14, first_k_dense_replace=2, attention_bias=True, num_experts=10, n_group=5,
        topk_group=3, top_k=5, routed_scaling_factor=3.0, rope_scaling=OF_LATENTS, tie_word_embeddings=True,
        topk_method="group_limited_greedy",
    ),
}  # fmt: skip
CASES: dict[str, TinyModel] = {
    "qwen": QWEN,
    "no-gqa": replace(QWEN, num_kv_heads=4),
    "one-kv-head": replace(QWEN, num_heads=6, num_kv_heads=1),
    "gqa-3": replace(QWEN, num_heads=6, num_kv_heads=2),
    "head-dim-above": replace(QWEN, head_dim=32),
    "head-dim-below": replace(QWEN, head_dim=6),
    "odd-sizes": replace(QWEN, hidden_size=52, head_dim=10, moe_intermediate_size=19, vocab_size=321),
    "raw-topk-weights": replace(QWEN, norm_topk_prob=False),
    "top-1": replace(QWEN, top_k=1),
    "top-all": replace(QWEN, top_k=8),
    "many-experts": replace(QWEN, num_experts=40, top_k=7),
    "dense-first-and-last": replace(QWEN, num_layers=4, mlp_only_layers=(0, 3)),
    "sparse-step-2": replace(QWEN, num_layers=4, decoder_sparse_step=2),
    "tied": replace(QWEN, tie_word_embeddings=True),
    "attention-bias": replace(QWEN, attention_bias=True),
    "sliding-window": replace(QWEN, sliding_window=9),
    "large-theta": replace(QWEN, rope_theta=5_000_000.0),
    "rope-linear": replace(QWEN, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "rope-dynamic": replace(
        QWEN, rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=32
    ),
    "rope-yarn": replace(QWEN, rope_scaling=YARN),
    "rope-yarn-old-form": replace(QWEN, rope_scaling=YARN, rope_form="rope_scaling"),
    "rope-yarn-mscale": replace(
        QWEN, rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False}
    ),
    "everything": replace(
        QWEN,
        num_layers=5,
        num_heads=6,
        num_kv_heads=2,
        head_dim=14,
        norm_topk_prob=False,
        mlp_only_layers=(4,),
        decoder_sparse_step=2,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_scaling=YARN,
        num_shards=3,
        top_k=3,
    ),
    "fused-experts": replace(QWEN, expert_layout="fused"),
    "mixtral": MIXTRAL,
    "mixtral-window": replace(MIXTRAL, sliding_window=9, num_kv_heads=1),
    "mixtral-fused": replace(MIXTRAL, expert_layout="fused", num_shards=2),
    "mixtral-linear": replace(MIXTRAL, rope_scaling={"rope_type": "linear", "factor": 2.0}, head_dim=20),
    **LATENT,
}
PROMPT = random_prompt(40)
NUM_GREEDY = 64


SELDOM = {
    "no-gqa", "gqa-3", "head-dim-below", "top-1", "top-all", "many-experts", "tied", "attention-bias", "large-theta",
    "rope-linear", "rope-yarn", "mixtral-linear",
}  # fmt: skip
"""Long tests whose features other cases, mainly "everything", cover as well."""


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.slow if name in SELDOM else ()) for name in CASES]
)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path, CASES[request.param])


def test_logits_and_greedy_tokens_equal_transformers(directory: Path) -> None:
    theirs = reference(directory)
    expected = reference_logits(theirs, PROMPT)
    ours = load(directory, num_sequences=2)
    _, hidden = ours.prefill(PROMPT)
    logits = ours.logits(hidden)
    difference = float(np.abs(logits - expected).max())
    assert difference < 1e-4
    assert np.abs(expected).max() > 1.0, "logits near zero would agree whatever the model does"

    answer, lead = ours.greedy(PROMPT, NUM_GREEDY)
    assert lead > 2 * difference, "a tie within rounding; pick another seed, this prompt decides nothing"
    assert answer == reference_greedy(theirs, PROMPT, NUM_GREEDY)


def test_prefill_in_chunks_is_bit_equal_to_prefill_at_once(directory: Path) -> None:
    runner = load(directory, num_sequences=4)
    whole, hidden = runner.prefill(PROMPT)
    following = runner.step((whole, [5]))[0]
    for chunks in ((1,) * 40, (7, 1, 13, 2), (39,)):
        seq, parts = runner.prefill(PROMPT, chunks)
        np.testing.assert_array_equal(parts, hidden)
        np.testing.assert_array_equal(runner.step((seq, [5]))[0], following)
    np.testing.assert_array_equal(runner.logits(hidden[-1:])[0], runner.logits(hidden)[-1])


@pytest.mark.parametrize(
    "case", ["qwen", "rope-dynamic", "sliding-window", "mixtral", "v3-groups", "v2-yarn"]
)
def test_a_batch_is_bit_equal_to_its_sequences_alone(tmp_path: Path, case: str) -> None:
    """One step that decodes a long sequence, begins a second and continues a third."""
    directory = write_tiny_model(tmp_path, CASES[case])
    prompts = [random_prompt(length, seed) for seed, length in enumerate((45, 6, 20))]
    alone = load(directory, num_sequences=3)
    expected = []
    for prompt, tail in zip(prompts, ([9], [], []), strict=True):
        seq, hidden = alone.prefill(prompt)
        expected.append(alone.step((seq, tail))[0] if tail else hidden)

    together = load(directory, num_sequences=3, num_threads=2)
    first, _ = together.prefill(prompts[0], (30,))
    second = together.sequence(6)
    third = together.sequence(20)
    together.step((third, prompts[2][:8]))
    got = together.step((third, prompts[2][8:]), (first, [9]), (second, prompts[1]))
    np.testing.assert_array_equal(got[0], expected[2][8:])
    np.testing.assert_array_equal(got[1], expected[0])
    np.testing.assert_array_equal(got[2], expected[1])


def test_threads_change_nothing(tmp_path: Path) -> None:
    model = replace(
        QWEN, hidden_size=256, num_heads=8, head_dim=32, mlp_only_layers=(1,), intermediate_size=512
    )
    directory = write_tiny_model(tmp_path, model)
    runs = [load(directory, num_threads=num_threads) for num_threads in (1, 2, 3)]
    logits = [run.logits(run.prefill(PROMPT, (33,))[1]) for run in runs]
    np.testing.assert_array_equal(logits[1], logits[0])
    np.testing.assert_array_equal(logits[2], logits[0])


def test_dynamic_scaling_sets_in_while_decoding(tmp_path: Path) -> None:
    """A prompt of 10 within the original 32: frequencies change with every token beyond, as in generate."""
    directory = write_tiny_model(tmp_path, CASES["rope-dynamic"])
    prompt = random_prompt(10)
    answer, _ = load(directory).greedy(prompt, NUM_GREEDY)
    assert answer == reference_greedy(reference(directory), prompt, NUM_GREEDY)
    unscaled = write_tiny_model(tmp_path / "unscaled", replace(CASES["rope-dynamic"], rope_scaling=None))
    plain, _ = load(unscaled).greedy(prompt, NUM_GREEDY)
    assert plain[:22] == answer[:22]
    assert plain != answer


@pytest.mark.parametrize("model", [QWEN, MIXTRAL, replace(QWEN, attention_bias=True, mlp_only_layers=(1,))])
def test_bfloat16_weights(tmp_path: Path, model: TinyModel) -> None:
    """Near transformers told dtype=float32, and nearer than transformers' own bfloat16 arithmetic, which rounds more.

    Where the CPU multiplies bfloat16, activations are rounded to it before each product; else products are exact.
    """
    directory = write_tiny_model(tmp_path, replace(model, dtype="bfloat16"))
    runner = load(directory)
    assert runner.model.config.dtype == "bfloat16"
    _, hidden = runner.prefill(PROMPT)
    logits = runner.logits(hidden)
    exact = reference_logits(reference(directory), PROMPT)
    error, scale = np.abs(logits - exact), np.abs(exact).max()
    rounded = reference_logits(reference(directory, torch.bfloat16), PROMPT)
    if rounds_activations("bf16"):
        assert np.median(error) < 0.005 * scale
        assert np.median(error) < np.median(np.abs(rounded - exact))
    else:
        assert error.max() < 1e-4
    assert np.median(np.abs(logits - rounded)) < 0.02 * scale


@pytest.mark.parametrize("model", [QWEN, MIXTRAL])
def test_float16_weights(tmp_path: Path, model: TinyModel) -> None:
    directory = write_tiny_model(tmp_path, replace(model, dtype="float16"))
    runner = load(directory)
    _, hidden = runner.prefill(PROMPT)
    expected = reference_logits(reference(directory), PROMPT)
    assert np.abs(runner.logits(hidden) - expected).max() < 1e-4


def test_the_bundled_model() -> None:
    """Trained weights in bfloat16, its own tokenizer and template: the directory that `make run` serves."""
    directory = bundled_model_path()
    tokenizer = Tokenizer.load(directory, vocab_size=read_config(directory).vocab_size)
    messages = [{"role": "user", "content": "Tell me the story of the fox and the golden apple."}]
    ids = tokenizer.encode(tokenizer.apply_chat_template(messages))
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert ids == their_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    runner, theirs = load(directory, num_sequences=2), reference(directory)
    _, hidden = runner.prefill(ids)
    expected = reference_logits(theirs, ids)
    error, scale = np.abs(runner.logits(hidden) - expected), np.abs(expected).max()
    assert error.max() < (0.02 * scale if rounds_activations("bf16") else 1e-4)
    assert np.median(error) < 0.002 * scale
    assert runner.greedy(ids, 24)[0] == reference_greedy(theirs, ids, 24)


@pytest.mark.parametrize("original_format", [True, False], ids=["original-names", "fused-names"])
@pytest.mark.parametrize("model", [replace(QWEN, rope_scaling=YARN), MIXTRAL], ids=["qwen", "mixtral"])
def test_what_transformers_saves_loads_the_same(
    tmp_path: Path, model: TinyModel, original_format: bool
) -> None:
    written = write_tiny_model(tmp_path / "written", model)
    saved = tmp_path / "saved"
    reference(written).save_pretrained(saved, max_shard_size="100KB", save_original_format=original_format)
    assert (saved / "model.safetensors.index.json").exists()
    expected, ours = load(written), load(saved)
    np.testing.assert_array_equal(
        ours.logits(ours.prefill(PROMPT)[1]), expected.logits(expected.prefill(PROMPT)[1])
    )


def test_a_wrong_corner_shows(tmp_path: Path) -> None:
    """The comparison can fail: each switch, flipped, moves the logits far beyond the tolerance."""
    base = replace(QWEN, rope_scaling=YARN, sliding_window=9)
    runner = load(write_tiny_model(tmp_path / "base", base))
    logits = runner.logits(runner.prefill(PROMPT)[1])
    flipped = {
        "norm": replace(base, norm_topk_prob=False),
        "rope": replace(base, rope_scaling=None),
        "window": replace(base, sliding_window=10),
        "top_k": replace(base, top_k=3),
        "theta": replace(base, rope_theta=20_000.0),
    }
    for name, model in flipped.items():
        other = load(write_tiny_model(tmp_path / name, model))
        assert np.abs(other.logits(other.prefill(PROMPT)[1]) - logits).max() > 0.01, name
