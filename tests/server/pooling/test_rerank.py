"""/v1/rerank and /score: cosine of embeddings, and the logits of Qwen3-Reranker's published prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_server import HTTP, serving
from twofold.api.config import EngineConfig, ServerConfig
from twofold.engine import Engine
from twofold.server.app import create_app

from tests.engine.embedding_models import DENSE
from tests.server.pooling.rerank_examples import DEFAULT, DOCUMENTS, QUERY, published
from tests.tiny_models.writing import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = replace(DENSE, max_position_embeddings=1024)
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tiny)


@pytest.fixture(scope="module", params=[None, '{"classifier_from_token": ["a", "the"]}'])
def served(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[str, Engine]]:
    engine = Engine.load(EngineConfig(model=str(model), max_num_seqs=3, pooler_config=request.param))
    engine.start()
    with serving(create_app(engine, ServerConfig())) as base:
        yield base, engine
    engine.close()


def cosines(engine: Engine, base: str) -> list[float]:
    data = HTTP.post(f"{base}/v1/embeddings", json={"input": [QUERY, *DOCUMENTS]}).json()["data"]
    query, *documents = (np.array(each["embedding"]) for each in data)
    return [float(query @ each) for each in documents]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_the_best_documents_come_first(served: Any, model: Path, path: str) -> None:
    base, engine = served
    if engine.pooling.classifier is None:
        expected = cosines(engine, base)
    else:
        expected = [published(model, document, DEFAULT) for document in DOCUMENTS]
    answer = HTTP.post(base + path, json={"model": "tiny", "query": QUERY, "documents": DOCUMENTS}).json()
    scores = {each["index"]: each["relevance_score"] for each in answer["results"]}
    np.testing.assert_allclose([scores[n] for n in range(4)], expected, atol=1e-4)
    assert [each["index"] for each in answer["results"]] == sorted(range(4), key=lambda n: -scores[n])
    for each in answer["results"]:
        assert each["document"]["text"] == DOCUMENTS[each["index"]]
    assert answer["model"] == "tiny"
    assert answer["usage"]["total_tokens"] > 20


def test_top_n_and_documents_as_objects(served: Any) -> None:
    base = served[0]
    body = {"query": QUERY, "documents": [{"text": text} for text in DOCUMENTS]}
    whole = HTTP.post(f"{base}/v1/rerank", json=body).json()["results"]
    two = HTTP.post(f"{base}/v2/rerank", json=body | {"top_n": 2, "return_documents": False}).json()[
        "results"
    ]
    assert two == [{k: each[k] for k in ("index", "relevance_score")} for each in whole[:2]]


def test_an_instruction_reaches_the_prompt_of_a_reranker(served: Any, model: Path) -> None:
    base, engine = served
    body = {"query": QUERY, "documents": DOCUMENTS[1:2], "instruction": "the rain"}
    score = HTTP.post(f"{base}/v1/rerank", json=body).json()["results"][0]["relevance_score"]
    if engine.pooling.classifier is not None:
        assert score == pytest.approx(published(model, DOCUMENTS[1], "the rain"), abs=1e-4)


def test_scores_are_those_of_rerank(served: Any) -> None:
    base = served[0]
    ranked = HTTP.post(f"{base}/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    by_index = [each["relevance_score"] for each in sorted(ranked, key=lambda each: each["index"])]
    for text_1 in (QUERY, [QUERY], [QUERY] * 4):
        answer = HTTP.post(f"{base}/score", json={"text_1": text_1, "text_2": DOCUMENTS}).json()
        assert [each["score"] for each in answer["data"]] == by_index
    assert HTTP.post(f"{base}/v1/score", json={"text_1": "a", "text_2": "the"}).json()["object"] == "list"


def test_a_long_document_is_named_or_cut(served: Any) -> None:
    base = served[0]
    body = {"query": QUERY, "documents": ["a", "fox " * 5000]}
    error = HTTP.post(f"{base}/v1/rerank", json=body).json()["error"]
    assert (error["param"], error["code"]) == ("documents[1]", "context_length_exceeded")
    cut = HTTP.post(f"{base}/v1/rerank", json=body | {"max_tokens_per_doc": 6})
    assert cut.json()["results"][0]["document"]["text"] in ("a", "fox " * 5000)
    assert HTTP.post(f"{base}/v1/rerank", json=body | {"truncate_prompt_tokens": -1}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query", "required"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "at least 1"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents", "at most 2048"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query", "empty"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "greater than"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, None, "give one text_1, or as many"),
    ],
)
def test_refused_bodies(
    served: Any, path: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    response = HTTP.post(served[0] + path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_a_classifiers_unknown_token_is_named(model: Path) -> None:
    engine = Engine.load(
        EngineConfig(model=str(model), pooler_config='{"classifier_from_token": ["no", "oui"]}')
    )
    engine.start()
    with serving(create_app(engine, ServerConfig())) as base:
        error = HTTP.post(f"{base}/v1/rerank", json={"query": "a", "documents": ["b"]}).json()["error"]
    engine.close()
    assert "the classifier's token 'no' is not in the vocabulary" in error["message"]
