"""Models with a classifier instead of a head (…ForSequenceClassification; GGUF files with rank pooling): their labels'
logits equal transformers', and /v1/rerank ranks by them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from live_server import HTTP, serving
from twofold.api.config import EngineConfig, ServerConfig
from twofold.api.errors import ModelLoadError
from twofold.api.pooling import QWEN_PAIR, Pooling
from twofold.engine import Engine
from twofold.models.model_files import open_model_files
from twofold.server.app import create_app
from twofold.tools.cli.main import main

from tests.engine.embedding_models import PROMPTS, pooled
from tests.server.pooling.rerank_examples import DEFAULT, DOCUMENTS, QUERY, published
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.table import EXAMPLES, tiny
from tests.tiny_models.writing import TinyModel, tiny_weights, write_tiny_model, write_weights

LONG = {"max_position_embeddings": 1024}
MODELS: dict[str, TinyModel] = {
    "qwen3": replace(EXAMPLES["qwen3"], **LONG),
    "llama": replace(EXAMPLES["llama"], **LONG),
    "qwen3_moe": TinyModel(**LONG),
    "tied": replace(EXAMPLES["qwen2"], tie_word_embeddings=True, **LONG),
}


def write_classifier(directory: Path, model: TinyModel, names: tuple[str, ...]) -> Path:
    """The tiny model with a classifier of these labels in its head's place."""
    write_tiny_model(directory, model)
    weights = {name: values for name, values in tiny_weights(model).items() if name != "lm_head.weight"}
    scores = np.random.default_rng(5).normal(0, 0.3, (len(names), model.hidden_size)).astype(np.float32)
    write_weights(
        directory, weights | {"score.weight": scores}, dtype=model.dtype, num_shards=model.num_shards
    )
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = [model.architecture.replace("ForCausalLM", "ForSequenceClassification")]
    config["id2label"] = {str(n): name for n, name in enumerate(names)}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def reference(directory: Path, prompts: list[tuple[int, ...]]) -> npt.NDArray[np.float32]:
    """transformers' logits [prompts, labels]. No padding token: one prompt at a time."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    model.config.pad_token_id = None
    with torch.no_grad():
        return np.stack([model(torch.tensor([prompt])).logits[0].numpy() for prompt in prompts])


def load(path: Path, **settings: Any) -> Engine:
    return Engine.load(EngineConfig(model=str(path), max_num_seqs=3, cpu_threads=1, **settings))


def logits_of(path: Path, **settings: Any) -> npt.NDArray[np.float32]:
    engine = load(path, **settings)
    rows = Pooling(tokens=tuple(range(engine.pooling.num_labels)))
    found = np.stack(pooled(engine, PROMPTS, rows))
    engine.close()
    return found


@pytest.mark.parametrize("names", [("LABEL_0",), ("no", "yes"), ("a", "b", "c")], ids=len)
@pytest.mark.parametrize("family", MODELS)
def test_its_logits_equal_transformers(tmp_path: Path, family: str, names: tuple[str, ...]) -> None:
    path = write_classifier(tmp_path / "model", MODELS[family], names)
    expected = reference(path, PROMPTS)
    found = logits_of(path)
    assert found.shape == (len(PROMPTS), len(names))
    assert np.abs(found - expected).max() < 1e-4
    assert np.abs(expected).max() > 0.1
    # In chunks, from the prefix cache, beside an emulated accelerator and packed: the same bits.
    np.testing.assert_array_equal(logits_of(path, max_num_batched_tokens=5), found)
    np.testing.assert_array_equal(logits_of(path, accelerator="emulated:rtx4090-pcie4"), found)
    assert main(["pack", str(path), str(tmp_path / "packed")]) == 0
    np.testing.assert_array_equal(logits_of(tmp_path / "packed"), found)


def test_a_scaled_head_does_not_scale_a_classifier(tmp_path: Path) -> None:
    """Granite divides its logits by a factor, transformers' classifier does not; it has none for this family, so the
    expected product is made here."""
    plain = write_classifier(tmp_path / "plain", tiny("granitemoe", logits_scaling=1.0), ("yes",))
    scaled = write_classifier(tmp_path / "scaled", tiny("granitemoe", logits_scaling=3.0), ("yes",))
    np.testing.assert_allclose(logits_of(scaled), logits_of(plain), rtol=1e-6)


@pytest.fixture(scope="module", params=[("LABEL_0",), ("yes", "no"), ("bad", "good")], ids=str)
def ranked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, tuple[str, ...]]]:
    path = write_classifier(tmp_path_factory.mktemp("ranker") / "model", MODELS["qwen3"], request.param)
    engine = load(path)
    engine.start()
    with serving(create_app(engine, ServerConfig())) as base:
        yield base, path, request.param
    engine.close()


def test_documents_are_ranked_by_the_relevant_label(ranked: tuple[str, Path, tuple[str, ...]]) -> None:
    base, path, names = ranked
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    pairs = [tuple(tokenizer(QUERY, text, split_special_tokens=True)["input_ids"]) for text in DOCUMENTS]
    logits = torch.from_numpy(reference(path, pairs))
    shares = torch.sigmoid(logits) if len(names) == 1 else torch.softmax(logits, -1)
    expected = shares[:, 0 if names[0] != "bad" else 1].numpy()
    results = HTTP.post(f"{base}/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    found = {each["index"]: each["relevance_score"] for each in results}
    np.testing.assert_allclose([found[n] for n in range(4)], expected, atol=1e-4)
    assert [each["index"] for each in results] == np.argsort(-expected).tolist()
    scores = HTTP.post(f"{base}/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()["data"]
    assert [each["score"] for each in scores] == [found[n] for n in range(4)]
    assert HTTP.post(f"{base}/v1/embeddings", json={"input": "a"}).status_code == 200
    refused = HTTP.post(f"{base}/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 400
    assert "generates nothing" in refused.json()["error"]["message"]


def test_more_than_two_labels_do_not_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_classifier(tmp_path / "model", MODELS["qwen3"], ("a", "b", "c"))
    assert main(["doctor", str(path)]) == 0
    assert (
        "reranking by its classifier of 3 labels; no head, so nothing is generated" in capsys.readouterr().out
    )
    engine = load(path)
    engine.start()
    with serving(create_app(engine, ServerConfig())) as base:
        error = HTTP.post(f"{base}/v1/rerank", json={"query": "a", "documents": ["b"]}).json()["error"]
    engine.close()
    assert "the classifier of this model has 3 labels; ranking takes one or two" in error["message"]


def test_a_classifier_without_its_matrix_is_refused(tmp_path: Path) -> None:
    write_classifier(tmp_path, MODELS["qwen3"], ("yes",))
    write_tiny_model(tmp_path / "head", MODELS["qwen3"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "head/config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"score\.weight is missing, the classifier of Qwen3ForSequence"):
        open_model_files(tmp_path / "head")


@pytest.mark.parametrize("is_named", [True, False], ids=["llama.cpp", "no names"])
def test_a_gguf_file_with_rank_pooling_ranks_like_its_source(
    tmp_path: Path, is_named: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """As llama.cpp's converter writes Qwen3-Reranker: two rows of the head, their names, and the prompt."""
    source = write_tiny_model(tmp_path / "tiny", MODELS["qwen3"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    head = tiny_weights(MODELS["qwen3"])["lm_head.weight"]
    yes_and_no = head[[tokenizer.convert_tokens_to_ids(token) for token in ("the", "a")]]

    def edit(writer: Any) -> None:
        writer.add_pooling_type(gguf.PoolingType.RANK)
        writer.add_tensor("cls.output.weight", yes_and_no)
        if is_named:
            writer.add_classifier_output_labels(["yes", "no"])
        writer.add_string("tokenizer.chat_template.rerank", QWEN_PAIR.replace("{instruction}", DEFAULT))

    file = write_tiny_gguf(tmp_path / "ranker.gguf", MODELS["qwen3"], edit=edit)
    assert main(["doctor", str(file)]) == 0
    assert "reranking by its classifier of 2 labels" in capsys.readouterr().out
    assert (
        main(["quantize", str(file), str(tmp_path / "quantised"), "--format", "q8_0", "--max-tokens", "0"])
        == 0
    )
    for path, error in ((file, 1e-4), (tmp_path / "quantised", 0.1)):
        engine = load(path)
        engine.start()
        with serving(create_app(engine, ServerConfig())) as base:
            for instruction in (DEFAULT, "the rain"):
                body = {"query": QUERY, "documents": DOCUMENTS, "instruction": instruction}
                results = HTTP.post(f"{base}/v1/rerank", json=body).json()["results"]
                found = {each["index"]: each["relevance_score"] for each in results}
                expected = [published(source, text, instruction) for text in DOCUMENTS]
                np.testing.assert_allclose([found[n] for n in range(4)], expected, atol=error)
        engine.close()
