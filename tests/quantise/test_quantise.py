"""`twofold quantize`: what is written, that a killed run goes on, what it costs in memory, and what it says."""

from __future__ import annotations

import errno
import json
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twofold.api.errors import ConfigError, ModelLoadError, TwofoldError
from twofold.blocks import ops
from twofold.blocks.block import ExpertBlock
from twofold.models.derived_model import fingerprint, source_config, write_tokenizer
from twofold.models.model_files import ModelFiles, open_model_files
from twofold.quantise import directory as directory_module
from twofold.quantise.directory import OutputDirectory
from twofold.quantise.layers import LayeredModel
from twofold.quantise.quality import Quality, compare, log_probabilities
from twofold.quantise.recipe import TARGETS, format_for, make_recipe
from twofold.quantise.rules import Rules
from twofold.quantise.texts import default_text
from twofold.text.tokenizer import Tokenizer
from twofold.tools.cli.main import main
from twofold.weights.weight_format import WeightMatrix

from tests.engine.model_runs import load
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import TinyModel, tiny_weights, write_tiny_model

TINY = TinyModel(
    hidden_size=256, head_dim=64, moe_intermediate_size=256, num_layers=2, num_experts=4, dtype="bfloat16"
)
FP8 = replace(TINY, dtype="float32")


@pytest.fixture(scope="module")
def pool() -> ops.ThreadPool:
    return ops.ThreadPool(2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("source"), TINY)


def quantise(source: Path, output: Path, target: str, pool: ops.ThreadPool) -> ModelFiles:
    files = open_model_files(source)
    out = OutputDirectory(output, make_recipe(files, Rules(target), pool), source, fingerprint(files, target))
    if not out.begin():
        out.write()
        out.finish(source_config(source, files.config), lambda: write_tokenizer(source, output, files.config))
    return open_model_files(output)


def matrices(files: ModelFiles) -> dict[str, WeightMatrix]:
    """The matrices of a model by what they do."""
    found = {"embedding": files.embedding.matrix("table"), "head": files.head.matrix("vocabulary")}
    for index, layer in enumerate(files.layers):
        for block, weights in layer:
            if isinstance(block, ExpertBlock):
                for expert, parts in enumerate(block.experts(weights)):
                    found |= {f"{index}.{expert}.{n}": m for n, m in zip(("g", "u", "d"), parts, strict=True)}
                continue
            found |= {
                f"{index}.{name}": weights.matrix(name)
                for name, spec in weights.specs.items()
                if len(spec.shape) == 2
            }
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_every_matrix_is_there_and_close(
    tmp_path: Path, source: Path, pool: ops.ThreadPool, target: str
) -> None:
    before, after = (
        matrices(files) for files in (open_model_files(source), quantise(source, tmp_path, target, pool))
    )
    assert before.keys() == after.keys()
    for name, matrix in after.items():
        expected = ops.dequantise(pool, before[name])
        error = np.linalg.norm(ops.dequantise(pool, matrix) - expected) / np.linalg.norm(expected)
        if name.endswith("gate"):
            assert (matrix.format, error) == ("bf16", 0.0)
        elif name in ("embedding", "head"):
            assert matrix.format == "q8_0"
            assert error < 0.01
        else:
            assert matrix.format == target
            bound = (
                0.12
                if target == "mxfp4"
                else {"8": 0.01, "6": 0.03, "5": 0.05, "4": 0.1}[target.strip("qint")[0]]
            )
            assert error < bound * (1.3 if target.endswith("_channel") else 1.0)


@pytest.mark.parametrize(
    "model",
    [
        replace(TINY, tie_word_embeddings=True),
        replace(TINY, expert_layout="fused", dtype="float16"),
        replace(TINY, mlp_only_layers=(0,), attention_bias=True, dtype="float32"),
        replace(TINY, architecture="MixtralForCausalLM", sliding_window=64),
        replace(TINY, num_shards=3, hidden_size=96, moe_intermediate_size=64, head_dim=20),
    ],
)
def test_any_model_runs_after_it(tmp_path: Path, pool: ops.ThreadPool, model: TinyModel) -> None:
    source = write_tiny_model(tmp_path / "source", model)
    files = quantise(source, tmp_path / "out", "q8_0", pool)
    quality = compare(open_model_files(source), files, [[5, 9, 200, 17, 44, 3], [7, 8]], pool)
    assert quality.num_tokens == 8
    assert quality.mean_kl < 0.1  # random weights: a rounding that changes an expert changes a lot
    assert Tokenizer.load(tmp_path / "out").decode([100, 101]) == Tokenizer.load(source).decode([100, 101])
    assert files.config == replace(open_model_files(source).config, dtype=files.config.dtype)


@pytest.mark.parametrize(
    ("target", "columns", "format"),
    [("q4_k", 512, "q4_k"), ("q4_k", 64, "int4"), ("q4_k", 96, "q4_0"), ("q4_k", 40, "bf16"), ("q5_k", 128, "q8_0"),
     ("q6_k", 32, "q8_0"), ("int8", 64, "q8_0"), ("int8_channel", 96, "int8_channel"), ("int4", 96, "q4_0"),
     ("q8_0", 48, "bf16")],
)  # fmt: skip
def test_rows_that_do_not_fill_blocks(target: str, columns: int, format: str) -> None:
    assert format_for(target, columns, "bf16") == format


def test_an_fp8_checkpoint_is_a_source(tmp_path: Path, pool: ops.ThreadPool) -> None:
    import torch
    from safetensors import torch as safetensors

    source = write_tiny_model(tmp_path / "source", FP8)
    tensors = {}
    for name, values in tiny_weights(FP8).items():
        weight = torch.from_numpy(values)
        if values.ndim == 2 and ("_proj" in name):
            blocks = [-(-size // 128) for size in values.shape]
            scales = torch.rand(blocks) * 0.01 + 0.001
            tensors[f"{name}_scale_inv"] = scales
            weight = (
                weight
                / scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(values), : values.shape[1]]
            )
            weight = weight.clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name] = weight
    safetensors.save_file(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps(config))
    files = quantise(source, tmp_path / "out", "q8_0", pool)
    before, after = matrices(open_model_files(source)), matrices(files)
    assert before["0.q"].format == "fp8"
    for name in ("0.q", "1.3.g", "1.0.d"):
        expected = ops.dequantise(pool, before[name])
        assert np.linalg.norm(ops.dequantise(pool, after[name]) - expected) < 0.01 * np.linalg.norm(expected)
    assert "scale_inv" not in " ".join(files.tensors)


def test_a_gguf_file_is_a_source(tmp_path: Path, pool: ops.ThreadPool) -> None:
    for model in (TINY, replace(TINY, architecture="MixtralForCausalLM", rope_theta=1e6)):
        source = write_tiny_gguf(tmp_path / f"{model.architecture}.gguf", model)
        output = tmp_path / model.architecture
        files = quantise(source, output, "q8_0", pool)
        before = open_model_files(source).config
        kept = {"dtype": before.dtype, "eos_token_ids": before.eos_token_ids, "generation": before.generation}
        assert replace(files.config, **kept) == before
        ours, theirs = Tokenizer.load(output), Tokenizer.open(source)
        assert ours.encode("the cat and <|im_end|>") == theirs.encode("the cat and <|im_end|>")
        assert ours.eos_token_ids == theirs.eos_token_ids
        chat = [{"role": "user", "content": "hi"}]
        assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
        assert compare(open_model_files(source), files, [[5, 9, 200]], pool).mean_kl < 0.1


class Killed(BaseException):
    pass


def kill_after(monkeypatch: pytest.MonkeyPatch, num_files: int, error: BaseException) -> None:
    """Let `error` strike in the middle of file number `num_files` + 1."""
    real, count = directory_module._write_safetensors, 0

    def write(path: Path, tensors: Any) -> Any:
        nonlocal count
        count += 1
        for number, written in enumerate(real(path, tensors)):
            if count > num_files and number == 2:
                raise error
            yield written

    monkeypatch.setattr(directory_module, "_write_safetensors", write)


def test_a_killed_run_resumes(
    tmp_path: Path, source: Path, pool: ops.ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, output = tmp_path / "whole", tmp_path / "killed"
    quantise(source, whole, "q4_k", pool)
    with monkeypatch.context() as patch:
        kill_after(patch, 1, Killed())
        with pytest.raises(Killed):
            quantise(source, output, "q4_k", pool)
    names = {path.name for path in output.iterdir()}
    assert "model-00001-of-00003.safetensors" in names
    assert "model-00002-of-00003.safetensors.part" in names
    assert "config.json" not in names
    with pytest.raises(ModelLoadError, match=r"config\.json: missing"):
        open_model_files(output)
    first = (output / "model-00001-of-00003.safetensors").stat()
    quantise(source, output, "q4_k", pool)
    assert (output / "model-00001-of-00003.safetensors").stat().st_mtime_ns == first.st_mtime_ns
    assert {path.name for path in output.iterdir()} == {path.name for path in whole.iterdir()}
    for path in whole.iterdir():
        assert path.read_bytes() == (output / path.name).read_bytes(), path.name
    quantise(source, output, "q4_k", pool)  # is complete already


def test_a_damaged_part_of_a_killed_run_is_made_again(
    tmp_path: Path, source: Path, pool: ops.ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        kill_after(patch, 2, Killed())
        with pytest.raises(Killed):
            quantise(source, tmp_path, "q4_0", pool)
    first = tmp_path / "model-00001-of-00003.safetensors"
    good = first.read_bytes()
    first.write_bytes(good[:-5])
    quantise(source, tmp_path, "q4_0", pool)
    assert first.read_bytes() == good


def test_a_full_disk_is_reported_and_keeps_existing_files(
    tmp_path: Path, source: Path, pool: ops.ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        kill_after(patch, 1, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(
            TwofoldError, match=r"the disk is full; .* GB are written and kept: free some space and run"
        ):
            quantise(source, tmp_path, "q8_0", pool)
    quantise(source, tmp_path, "q8_0", pool)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1000))  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=r"GB are needed, 0\.00 GB are free"):
            quantise(source, tmp_path / "new", "q8_0", pool)


def test_a_directory_of_something_else_is_left_alone(
    tmp_path: Path, source: Path, pool: ops.ThreadPool
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match=r"holds notes\.txt of something else"):
        quantise(source, tmp_path / "mine", "q8_0", pool)
    quantise(source, tmp_path / "out", "q8_0", pool)
    with pytest.raises(ConfigError, match="of something else than this run"):
        quantise(source, tmp_path / "out", "q4_0", pool)
    with pytest.raises(ConfigError, match="is the model itself"):
        quantise(source, source, "q8_0", pool)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made or read"):
        quantise(source, tmp_path / "file", "q8_0", pool)


def test_memory_stays_below_two_layers(tmp_path: Path, pool: ops.ThreadPool) -> None:
    model = replace(TINY, num_layers=4, num_experts=16, vocab_size=270)
    source = write_tiny_model(tmp_path / "source", model)
    files = open_model_files(source)
    layer = sum(
        spec_bytes
        for spec_bytes in (files.tensors.entry(n).num_bytes for n in files.tensors if ".layers.1." in n)
    )
    tracemalloc.start()
    try:
        quantise(source, tmp_path / "out", "q8_0", pool)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * layer


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, pool: ops.ThreadPool) -> None:
    source = write_tiny_model(tmp_path / "source", replace(TINY, dtype="float32"))
    file = source / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-4:] = np.float32(np.nan).tobytes()
    file.write_bytes(raw)
    with pytest.raises(ModelLoadError, match=r"tensor lm_head\.weight holds a weight that is not finite"):
        quantise(source, tmp_path / "out", "q4_0", pool)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(version=2), "version is 2, expected 1: another version of Twofold wrote it"),
        (lambda c: c.pop("tensors"), "tensors is None, expected an object"),
        (lambda c: c["tensors"].update(x="q4_k"), "names tensor x, which is in no file"),
        (
            lambda c: c["tensors"].update({"lm_head.weight": "q9"}),
            "lm_head.weight is 'q9', expected one of q8_0",
        ),
        (lambda c: c["tensors"].update({"lm_head.weight": "q4_k"}), "expected U8 rows of whole q4_k blocks"),
        (lambda c: c["tensors"].update({"lm_head.weight": "int8"}), "expected U8 rows of whole int8 blocks"),
        (lambda c: c["tensors"].update({"model.norm.weight": "q8_0"}), "model.norm.weight is BF16"),
        (lambda c: c["tensors"].pop("lm_head.weight"), "lm_head.weight has dtype U8"),
        (lambda c: c.update(quant_method="exl2"), "quant_method 'exl2') is not supported"),
    ],
)
def test_a_wrong_record_of_formats(
    tmp_path: Path, source: Path, pool: ops.ThreadPool, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    quantise(source, tmp_path, "q8_0", pool)
    config = json.loads((tmp_path / "config.json").read_text())
    edit(config["quantization_config"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError) as refused:
        open_model_files(tmp_path)
    assert message in str(refused.value)


def test_a_model_against_itself_and_against_noise(source: Path, tmp_path: Path, pool: ops.ThreadPool) -> None:
    files = open_model_files(source)
    ids = [[int(i) for i in np.random.default_rng(0).integers(3, 320, 20)]]
    same = compare(files, files, ids, pool)
    assert (same.mean_kl, same.max_kl, same.same_top) == (0.0, 0.0, 1.0)
    assert same.perplexity == same.source_perplexity
    assert same.verdict.startswith("as good as the source")
    other = open_model_files(write_tiny_model(tmp_path, replace(TINY, seed=1)))
    noise = compare(files, other, ids, pool)
    assert noise.mean_kl > 0.5
    assert noise.verdict.startswith("bad")


def test_a_narrow_kv_cache_costs_more_the_fewer_bits_it_has(source: Path, pool: ops.ThreadPool) -> None:
    files = open_model_files(source)
    ids = [[int(i) for i in np.random.default_rng(0).integers(3, 320, 40)]]
    cost = {
        dtype: compare(files, files, ids, pool, cache_dtypes=("float32", dtype)).mean_kl
        for dtype in ("q8", "fp8")
    }
    assert 0 < cost["q8"] < cost["fp8"] < 0.05


def test_figures_are_those_of_their_definitions(source: Path, pool: ops.ThreadPool, tmp_path: Path) -> None:
    import torch

    files, other = open_model_files(source), quantise(source, tmp_path, "q4_0", pool)
    ids = [[5, 9, 200, 17, 44, 3, 80], [7, 8, 9]]
    found = compare(files, other, ids, pool)
    p, q = (
        [torch.from_numpy(model.logits(h)).double().log_softmax(-1) for h in model.hidden_states(ids)]
        for model in (LayeredModel(files, pool), LayeredModel(other, pool))
    )
    kl = torch.cat(
        [
            torch.nn.functional.kl_div(b, a, log_target=True, reduction="none").sum(-1)
            for a, b in zip(p, q, strict=True)
        ]
    )
    losses = torch.cat(
        [-b[:-1].gather(1, torch.tensor(i[1:])[:, None])[:, 0] for b, i in zip(q, ids, strict=True)]
    )
    np.testing.assert_allclose(found.mean_kl, float(kl.mean()), rtol=1e-9)
    np.testing.assert_allclose(found.max_kl, float(kl.max()), rtol=1e-9)
    np.testing.assert_allclose(found.perplexity, float(losses.mean().exp()), rtol=1e-9)
    assert found.num_tokens == 10


def test_the_layered_pass_is_the_engines(source: Path, pool: ops.ThreadPool) -> None:
    ids = [int(i) for i in np.random.default_rng(3).integers(3, 320, 40)]
    runner = load(source)
    _, hidden = runner.prefill(ids)
    ours = LayeredModel(open_model_files(source), pool)
    theirs = runner.logits(hidden)
    np.testing.assert_allclose(ours.logits(ours.hidden_states([ids])[0]), theirs, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("family", ["gemma4-small", "glm_moe_dsa", "mistral_large4"])
def test_the_layered_pass_keeps_what_later_layers_read(
    tmp_path: Path, pool: ops.ThreadPool, family: str
) -> None:
    directory = write_tiny_model(tmp_path, EXAMPLES[family])
    ids = [[int(i) for i in np.random.default_rng(length).integers(3, 260, length)] for length in (40, 23)]
    runner = load(directory)
    for ours, each in zip(
        LayeredModel(open_model_files(directory), pool).hidden_states(ids), ids, strict=True
    ):
        np.testing.assert_array_equal(ours, runner.prefill(each)[1])


def test_log_probabilities_do_not_overflow() -> None:
    found = log_probabilities(np.array([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]], np.float32))
    np.testing.assert_allclose(found[0], [0.0, -1e4, -2e4])
    np.testing.assert_allclose(found[1], np.log(1 / 3))
    assert len(default_text().split()) > 800


def test_verdicts_follow_the_mean_divergence() -> None:
    verdicts = [Quality(1, kl, 0, 0, 1, 1, 1, ()).verdict.split(":")[0] for kl in (0.0, 0.01, 0.05, 0.2)]
    assert verdicts == ["as good as the source", "good", "noticeable", "bad"]


RULES = """
format: int8
rules:
  - {blocks: attention, format: bf16}
  - {blocks: experts, tensors: "*.down_proj", format: q8_0}
  - {layers: [0, last], blocks: experts, format: f32}
  - {blocks: [embedding, head], format: bf16}
"""


def test_a_rule_file_decides_by_block_layer_and_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = TinyModel(
        num_layers=4, mlp_only_layers=(2,), hidden_size=128, moe_intermediate_size=128, head_dim=32
    )
    source = write_tiny_model(tmp_path / "source", model)
    (tmp_path / "rules.yaml").write_text(RULES)
    arguments = ["quantize", str(source), str(tmp_path / "out"), "--rules", str(tmp_path / "rules.yaml")]
    assert main([*arguments, "--max-tokens", "40", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    files = open_model_files(tmp_path / "out")
    assert files.expert_formats() == (("f32",) * 3, ("int8", "int8", "q8_0"), ("f32",) * 3)
    formats = {name: files.tensors.entry(name).format for name in files.tensors}
    assert {formats[f"model.layers.{n}.self_attn.q_proj.weight"] for n in range(4)} == {"bf16"}
    assert formats["model.layers.2.mlp.up_proj.weight"] == "int8"
    assert formats["model.embed_tokens.weight"] == "bf16"
    drift = printed["quality"]["drift_by_layer"]
    assert len(drift) == 4
    assert 0 < drift[0] < drift[-1] < 0.1
    assert [layer["layer"] for layer in printed["layers"]] == [0, 1, 2, 3, None]
    assert sum(layer["bytes"] for layer in printed["layers"]) == printed["bytes"]
    assert main([*arguments, "--max-tokens", "40"]) == 0
    assert "1-1" in capsys.readouterr().out

    (tmp_path / "rules.yaml").write_text(RULES + "  - {layers: 9, format: q8_0}\n")
    arguments[2] = str(tmp_path / "other")
    assert main([*arguments, "--max-tokens", "0"]) == 2
    assert "rule 5 fits no tensor of this model, which has 4 layers of attention" in capsys.readouterr().err
