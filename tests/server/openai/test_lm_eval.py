"""lm-eval's API models on a small task of this file, against a real server: what they score is what the engine says.

Needs the extra `clients`; nothing is fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="the extra `clients` is not installed")

from live_server import serving
from twofold.api.config import EngineConfig, ServerConfig
from twofold.api.types import Chunk, SamplingParams
from twofold.engine import Engine
from twofold.models.bundled import bundled_model_path
from twofold.server.app import create_app

pytestmark = pytest.mark.slow

MODEL = bundled_model_path()
QUESTIONS = (
    ("Once upon a time there lived a", [" king", " queue", " kernel"]),
    ("The fox said to the", [" wolf", " of", " raven and the bear"]),
    ("In the deep dark", [" forest", " wood there stood a house", " and"]),
    ("The miller had three", [" sons", " son", " golden hairs"]),
)
CHOICES_TASK = """
task: tales_choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
"""
ANSWERS_TASK = """
task: tales_answers
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, temperature: 0.0}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    loaded = Engine.load(EngineConfig(model=str(MODEL), accelerator="none", cpu_threads=1))
    loaded.start()
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with serving(create_app(engine, ServerConfig())) as base:
        yield base


@pytest.fixture
def samples(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs one of the tasks; lm-eval's samples of it."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    data = tmp_path / "tales.jsonl"
    rows = [{"question": text, "choices": choices, "answer": 0} for text, choices in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in (("choices", CHOICES_TASK), ("answers", ANSWERS_TASK)):
        (tmp_path / f"{name}.yaml").write_text(task.replace("DATA", str(data)))

    def run(kind: str, endpoint: str, task: str, **options: Any) -> list[dict[str, Any]]:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        result = simple_evaluate(
            model=kind,
            model_args={
                "model": MODEL.name,
                "base_url": f"{url}/v1/{endpoint}",
                "tokenizer": str(MODEL),
                "tokenizer_backend": "huggingface",
                "num_concurrent": 4,
            },
            tasks=[task],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            bootstrap_iters=0,
            **options,
        )
        return sorted(result["samples"][task], key=lambda sample: sample["doc_id"])

    return run


def test_log_likelihoods_are_the_engines(samples, engine):
    """Scores from echo and logprobs, as lm-eval requests them."""
    scored = samples("local-completions", "completions", "tales_choices")
    assert len(scored) == len(QUESTIONS)
    for sample, (question, choices) in zip(scored, QUESTIONS, strict=True):
        for (logprob, is_greedy), choice in zip(sample["filtered_resps"], choices, strict=True):
            before, whole = engine.tokenizer.encode(question), engine.tokenizer.encode(question + choice)
            assert whole[: len(before)] == before
            chunks: list[Chunk] = []
            requested = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
            engine.generate(whole, requested, chunks.append)
            entries = (chunks[0].prompt_logprobs or ())[len(before) :]
            own = [entry for entry in entries if entry is not None]
            assert len(own) == len(whole) - len(before)
            assert logprob == pytest.approx(sum(entry.logprob for entry in own), abs=1e-5)
            assert is_greedy == all(entry.top[0][0] == entry.token_id for entry in own)


@pytest.mark.parametrize("kind", ["local-completions", "local-chat-completions"])
def test_generated_texts_are_the_engines(kind, samples, engine):
    is_chat = kind == "local-chat-completions"
    endpoint = "chat/completions" if is_chat else "completions"
    answered = samples(kind, endpoint, "tales_answers", **({"apply_chat_template": True} if is_chat else {}))
    for sample, (question, _) in zip(answered, QUESTIONS, strict=True):
        text = question
        if is_chat:
            text = engine.tokenizer.apply_chat_template([{"role": "user", "content": question}])
        chunks: list[Chunk] = []
        requested = SamplingParams(max_tokens=12, temperature=0.0, stop=(".",))
        engine.generate(engine.tokenizer.encode(text), requested, chunks.append)
        assert sample["resps"][0][0] == "".join(chunk.text for chunk in chunks)
