"""DeepSeek-V2 and V3 against transformers over the odd corners of their configurations, and against themselves."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.errors import ModelLoadError
from twofold.api.types import SamplingParams
from twofold.blocks import ops
from twofold.device.decode_inputs import DecodeRow
from twofold.device.kernels import TorchKernels
from twofold.device.model import DeviceModel
from twofold.engine import Engine
from twofold.models.model_files import open_model_files
from twofold.models.sizing import measure_files
from twofold.tools.cli.main import main

from tests.engine.model_runs import load, random_prompt
from tests.engine.test_device_model import (
    PAGE,
    PAGES,
    chunk,
    close,
    cpu_logits,
    decode_graphs,
    device_model,
    run,
)
from tests.models.test_sizing import held_by
from tests.models.transformers_runs import one_torch_thread, reference, reference_greedy, reference_logits
from tests.tiny_models.deepseek import TinyDeepseek
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.writing import write_tiny_model
from tests.weights.fp8_models import write_both

torch = pytest.importorskip("torch")
pytest.importorskip("twofold._core")

__all__ = ["one_torch_thread"]  # a fixture

V3 = TinyDeepseek()
V2 = TinyDeepseek(architecture="DeepseekV2ForCausalLM")
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
PUBLISHED_YARN = {("type" if key == "rope_type" else key): value for key, value in YARN.items()}

CASES: dict[str, TinyDeepseek] = {
    "v3": V3,
    "v3-plain-queries": replace(V3, q_lora_rank=None),
    "v3-groups": replace(V3, num_experts=12, num_groups=4, top_groups=2, top_k=5, routed_scaling_factor=2.5),
    "v3-one-group-of-two": replace(V3, num_experts=6, num_groups=3, top_groups=1, top_k=2),
    "v3-raw-weights": replace(V3, norm_topk_prob=False, routed_scaling_factor=1.7),
    "v3-yarn": replace(V3, rope_scaling=YARN, rope_form="rope_scaling"),
    "v3-yarn-mscale": replace(V3, rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}),
    "v3-yarn-without-mscale": replace(
        V3, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    ),
    "v3-halves": replace(V3, rope_interleave=False, rope_scaling=YARN),
    "v3-bias": replace(V3, attention_bias=True),
    "v3-bias-plain-queries": replace(V3, attention_bias=True, q_lora_rank=None),
    "v3-no-dense": replace(V3, first_dense=0, num_layers=2),
    "v3-mostly-dense-tied": replace(V3, num_layers=4, first_dense=3, tie_word_embeddings=True),
    "v3-odd-sizes": replace(
        V3, num_heads=7, hidden_size=35, q_lora_rank=9, kv_lora_rank=33, qk_nope_head_dim=5, qk_rope_head_dim=2,
        v_head_dim=3, moe_intermediate_size=19, vocab_size=321, num_shards=2,
    ),
    "v3-values-wider-than-latents": replace(V3, kv_lora_rank=6, v_head_dim=20, num_heads=2),
    "v2": V2,
    "v2-lite": replace(V2, q_lora_rank=None, num_shared_experts=2, top_k=3, num_experts=9),
    "v2-groups": replace(
        V2, num_experts=12, num_groups=3, top_groups=2, top_k=4, routed_scaling_factor=16.0, num_shared_experts=3
    ),
    "v2-yarn": replace(V2, rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, q_lora_rank=None),
    "v2-everything": replace(
        V2, num_layers=4, num_heads=6, hidden_size=42, q_lora_rank=14, kv_lora_rank=18, qk_nope_head_dim=6,
        qk_rope_head_dim=10, v_head_dim=14, first_dense=2, attention_bias=True, num_experts=10, num_groups=5,
        top_groups=3, top_k=5, routed_scaling_factor=3.0, rope_scaling=YARN, tie_word_embeddings=True,
    ),
}  # fmt: skip
PROMPT = random_prompt(40)
NUM_GREEDY = 64


@pytest.fixture(params=list(CASES))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path, CASES[request.param])


def test_logits_and_greedy_tokens_equal_transformers(directory: Path) -> None:
    theirs = reference(directory)
    expected = reference_logits(theirs, PROMPT)
    ours = load(directory, num_sequences=2)
    logits = ours.logits(ours.prefill(PROMPT)[1])
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


@pytest.mark.parametrize("case", ["v3-groups", "v2-yarn"])
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
    second, third = together.sequence(6), together.sequence(20)
    together.step((third, prompts[2][:8]))
    got = together.step((third, prompts[2][8:]), (first, [9]), (second, prompts[1]))
    np.testing.assert_array_equal(got[0], expected[2][8:])
    np.testing.assert_array_equal(got[1], expected[0])
    np.testing.assert_array_equal(got[2], expected[1])


def test_a_wrong_corner_shows(tmp_path: Path) -> None:
    """The comparison can fail: each switch, flipped, moves the logits far beyond the tolerance."""
    base = replace(CASES["v3-groups"], rope_scaling=YARN)
    runner = load(write_tiny_model(tmp_path / "base", base))
    logits = runner.logits(runner.prefill(PROMPT)[1])
    flipped = {
        "norm": replace(base, norm_topk_prob=False),
        "rope": replace(base, rope_scaling=None),
        "mscale": replace(base, rope_scaling=YARN | {"mscale_all_dim": 0.5}),
        "pairs": replace(base, rope_interleave=False),
        "groups": replace(base, num_groups=1, top_groups=1),
        "scale": replace(base, routed_scaling_factor=1.0),
    }
    for name, model in flipped.items():
        other = load(write_tiny_model(tmp_path / name, model))
        assert np.abs(other.logits(other.prefill(PROMPT)[1]) - logits).max() > 0.01, name


def test_layers_that_predict_further_tokens_are_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_tiny_model(tmp_path / "with", replace(V3, num_mtp_layers=1))
    with caplog.at_level(logging.INFO, logger="twofold"):
        with_mtp = load(directory)
    assert "multi-token prediction is not run; left out: model.layers.3.*" in caplog.text
    logits = with_mtp.logits(with_mtp.prefill(PROMPT)[1])
    assert np.abs(logits - reference_logits(reference(directory), PROMPT)).max() < 1e-4


@pytest.mark.parametrize("sizes", ["odd", "whole-blocks"])
def test_an_fp8_checkpoint_equals_its_dequantised_twin(tmp_path: Path, sizes: str) -> None:
    """With heads that scales of 128 x 128 weights divide, kv_b is absorbed as it is, else in float32."""
    model = replace(
        V3, hidden_size=160, moe_intermediate_size=144, kv_lora_rank=136, q_lora_rank=140, num_layers=2
    )
    if sizes == "whole-blocks":
        model = replace(model, num_heads=2, qk_nope_head_dim=128, v_head_dim=128, kv_lora_rank=256)
    fp8, float32 = write_both(tmp_path, model)
    ours, twin = load(fp8), load(float32)
    prompt = random_prompt(20)
    got, expected = (run.logits(run.prefill(prompt)[1]) for run in (ours, twin))
    assert np.abs(expected).max() > 1
    assert np.abs(got - expected).max() < 1e-3
    assert ours.greedy(prompt, 12)[0] == twin.greedy(prompt, 12)[0]


@pytest.mark.parametrize("case", ["v3-groups", "v2-lite", "v2-yarn"])
@pytest.mark.parametrize("split_kv", [True, False], ids=["k_b-v_b", "kv_b"])
def test_a_gguf_file_is_bit_equal_to_the_directory(tmp_path: Path, case: str, split_kv: bool) -> None:
    model = CASES[case]
    directory = load(write_tiny_model(tmp_path / "directory", model))
    file = load(write_tiny_gguf(tmp_path / "model.gguf", model, split_kv=split_kv))
    for ours in (file, directory):
        assert ours.model.config.max_context == directory.model.config.max_context
    np.testing.assert_array_equal(
        file.logits(file.prefill(PROMPT)[1]), directory.logits(directory.prefill(PROMPT)[1])
    )


def test_a_quantised_kv_b_is_absorbed_exactly(tmp_path: Path) -> None:
    """Q8_0 runs along the latents; the keys' part, which is multiplied across, becomes float32."""
    model = replace(
        V2, hidden_size=64, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, v_head_dim=32, qk_rope_head_dim=32,
        num_shared_experts=2, moe_intermediate_size=32,
    )  # fmt: skip
    eight = write_tiny_gguf(
        tmp_path / "eight.gguf",
        model,
        split_kv=False,
        type_of=lambda name: "Q8_0" if "kv_b" in name else "F32",
    )
    files = open_model_files(eight)
    pool = ops.ThreadPool(1)
    for block, weights in files.layers[1]:
        if "kv_b" not in weights:
            continue
        whole = ops.dequantise(pool, weights.matrix("kv_b")).reshape(model.num_heads, 64, 32)
        keys, values = block.absorbed(weights, pool)
        assert {part.format for part in keys} == {"f32"}
        assert {part.format for part in values} == {"q8_0"}
        for head, (k, v) in enumerate(zip(keys, values, strict=True)):
            np.testing.assert_array_equal(k.data.T, whole[head, :32])
            np.testing.assert_array_equal(ops.dequantise(pool, v), whole[head, 32:])
        packed = sum(ops.PackedMatrix(pool, parts).bytes for parts in (keys, values))
        others = sum(weights.packed_bytes(part) for part in weights.specs if part != "kv_b")
        assert block.host_bytes(weights) == others + packed
        return
    raise AssertionError("no block has a kv_b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_method": "random"}, "topk_method"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        ({"n_group": 3}, "8 experts"),
        ({"topk_group": 9, "n_group": 4}, "topk_group"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    class Changed(TinyDeepseek):
        def config(self) -> dict[str, object]:
            return super().config() | changes

    write_tiny_model(tmp_path, Changed())
    with pytest.raises(ModelLoadError, match=message):
        open_model_files(tmp_path)


def test_moe_layer_freq_spaces_the_mixtures(tmp_path: Path) -> None:
    class Spaced(TinyDeepseek):
        def is_moe_layer(self, layer: int) -> bool:
            return layer >= self.first_dense and layer % 2 == 0

        def config(self) -> dict[str, object]:
            return super().config() | {"moe_layer_freq": 2}

    config = open_model_files(write_tiny_model(tmp_path, Spaced(num_layers=6))).config
    assert config.moe_layers == (2, 4)


@pytest.mark.parametrize("case", ["v3-groups", "v3-bias-plain-queries", "v2-yarn", "v2-everything"])
@pytest.mark.parametrize("split_kv", [None, True], ids=["directory", "gguf"])
def test_a_device_computes_the_same_within_bf16_rounding(
    tmp_path: Path, case: str, split_kv: bool | None
) -> None:
    """With the kernels in plain torch: two chunks, then decode steps. All experts are chosen: no tie decides."""
    model = replace(CASES[case], top_k=CASES[case].num_experts, num_groups=1, top_groups=1, dtype="bfloat16")
    path = write_tiny_model(tmp_path / "directory", model)
    if split_kv is not None:
        if model.attention_bias:
            pytest.skip("GGUF files have no biases of latent attention")
        path = write_tiny_gguf(tmp_path / "model.gguf", model, type_of=lambda name: "BF16")
    tokens = random_prompt(33)
    device, moe = device_model(path)
    kept = device.state(10, PAGE)
    parts = [device.forward(chunk(tokens, 0, 20), kept, moe), device.forward(chunk(tokens, 20, 9), kept, moe)]
    graphs = decode_graphs(lambda batch: (device.forward(batch, kept, moe),), len(PAGES))
    parts += [run(graphs, [DecodeRow(tokens[i], i, PAGES)]) for i in range(29, 33)]
    assert close(device.logits(torch.cat(parts)), cpu_logits(path, tokens))
    assert graphs.fall_back_reason is None


@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0])
def test_the_same_tokens_wherever_experts_run(tmp_path: Path, ratio: float) -> None:
    directory = write_tiny_model(tmp_path, CASES["v3-groups"])
    answers = []
    for accelerator in ("none", "emulated:rtx4090-pcie4"):
        engine = Engine.load(
            EngineConfig(
                model=str(directory), accelerator=accelerator, gpu_experts_ratio=ratio, cpu_threads=1
            )
        )
        tokens: list[int] = []
        sampling = SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)
        engine.generate(PROMPT, sampling, lambda chunk, tokens=tokens: tokens.extend(chunk.token_ids))
        answers.append(tokens)
        assert (engine.stats().placement.hits == 0) == (accelerator == "none" or ratio == 0.0)
        engine.close()
    assert len(answers[0]) == 24
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("case", "split_kv"), [("v3-groups", True), ("v2-yarn", False)])
def test_quantising_a_gguf_file_keeps_its_configuration_and_answers(
    tmp_path: Path, case: str, split_kv: bool
) -> None:
    # All experts are chosen, so that rounding cannot change the choice.
    model = replace(CASES[case], rope_scaling=YARN, top_k=CASES[case].num_experts, num_groups=1, top_groups=1)
    source = write_tiny_gguf(tmp_path / "model.gguf", model, split_kv=split_kv)
    written = tmp_path / "quantised"
    assert main(["quantize", str(source), str(written), "--format", "q8_0", "--max-tokens", "0"]) == 0
    assert open_model_files(written).config.layers == open_model_files(source).config.layers
    got, expected = (run.logits(run.prefill(PROMPT)[1]) for run in (load(written), load(source)))
    assert np.linalg.norm(got - expected) < 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize("gguf", [False, True])
def test_dense_weights_on_a_device_are_those_that_the_device_model_holds(tmp_path: Path, gguf: bool) -> None:
    model = replace(CASES["v3-groups"], num_shared_experts=2)
    path = write_tiny_gguf(tmp_path / "m.gguf", model) if gguf else write_tiny_model(tmp_path, model)
    files = open_model_files(path)
    device = DeviceModel(
        files, ops.ThreadPool(1), torch.device("cpu"), TorchKernels(), files.config.max_context
    )
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held_by(device, torch.Tensor))
    assert measure_files(files).device_dense_bytes == num_bytes
