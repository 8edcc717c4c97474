"""llama.cpp's /infill: the prompt of a gap among other files, and answers as llama.cpp's clients read them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from twofold.api.config import ServerConfig
from twofold.server.app import create_app

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
FIRST_MARK = 1000
GAP: dict[str, Any] = {"input_prefix": "before", "input_suffix": "after"}
FILES = [{"filename": "a.py", "text": "one two"}, {"filename": "b.py", "text": "three"}]


def with_marks(engine: FakeEngine, marks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {mark: FIRST_MARK + number for number, mark in enumerate(marks)}
    monkeypatch.setattr(type(engine.tokenizer), "token_id", lambda self, token: ids.get(token))
    monkeypatch.setattr(type(engine.tokenizer), "special_token_ids", frozenset(ids.values()))


def written(engine: FakeEngine) -> str:
    """The last prompt, with the numbers of its marks."""
    tokens = engine.requests[-1].prompt_token_ids
    return " ".join(
        str(token - FIRST_MARK) if token >= FIRST_MARK else engine.tokenizer.word(token) for token in tokens
    )


@pytest.mark.parametrize(
    ("marks", "body", "prompt"),
    [
        (QWEN, {}, "0 before 1 after 2"),
        (QWEN, {"input_suffix": ""}, "0 before 1 2"),
        (QWEN, {"input_prefix": "", "input_suffix": ""}, "0 1 2"),
        (QWEN, {"prompt": " typed"}, "0 before typed 1 after 2"),
        (
            QWEN,
            {"input_extra": FILES},
            "3 myproject 4 a.py one two 4 b.py three 4 filename 0 before 1 after 2",
        ),
        (
            QWEN[:3],
            {"input_extra": FILES},
            "--- snippet --- one two --- snippet --- three 0 before 1 after 2",
        ),
    ],
)
def test_files_come_before_the_gap(
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    marks: tuple[str, ...],
    body: dict[str, Any],
    prompt: str,
) -> None:
    with_marks(engine, marks, monkeypatch)
    with serving(create_app(engine, ServerConfig())) as url:
        answer = HTTP.post(f"{url}/infill", json=GAP | body)
        assert answer.status_code == 200, answer.text
    assert written(engine) == prompt
    assert set(engine.requests[-1].sampling.stop_token_ids) >= {FIRST_MARK, FIRST_MARK + 1, FIRST_MARK + 2}


def test_the_last_files_stay_where_the_context_is_short(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_marks(engine, QWEN, monkeypatch)
    files = [{"filename": "long.py", "text": "word " * 2 * engine.max_context}, FILES[1]]
    with serving(create_app(engine, ServerConfig())) as url:
        answer = HTTP.post(f"{url}/infill", json=GAP | {"input_extra": files, "n_predict": 8})
        assert answer.status_code == 200, answer.text
        assert written(engine).endswith("word 4 b.py three 4 filename 0 before 1 after 2")
        assert len(engine.requests[-1].prompt_token_ids) == engine.max_context - 8


def test_sampling_has_llama_cpps_names(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with_marks(engine, QWEN, monkeypatch)
    with serving(create_app(engine, ServerConfig())) as url:
        requested = {
            "n_predict": 3,
            "top_k": 40,
            "top_p": 0.9,
            "repeat_penalty": 1.5,
            "seed": 7,
            "stop": ["x"],
        }
        ignored = {"t_max_predict_ms": 500, "samplers": ["top_k", "infill"], "cache_prompt": True}
        assert HTTP.post(f"{url}/infill", json=GAP | requested | ignored).status_code == 200
        sampling = engine.requests[-1].sampling
        assert (sampling.max_tokens, sampling.top_k, sampling.top_p) == (3, 40, 0.9)
        assert (sampling.repetition_penalty, sampling.seed, sampling.stop) == (1.5, 7, ("x",))
        assert HTTP.post(f"{url}/infill", json=GAP | {"n_predict": -1, "seed": -1}).status_code == 200
        assert engine.requests[-1].sampling.max_tokens > 3


def test_whole_answers_and_streams_are_llama_cpps(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_marks(engine, QWEN, monkeypatch)
    engine.rotates = True  # the answer begins after the prompt's first mark, which would end it
    requested = {"input_prefix": "one two three four", "input_suffix": "after", "n_predict": 3, "seed": 1}
    with serving(create_app(engine, ServerConfig())) as url:
        whole = HTTP.post(f"{url}/infill", json=requested).json()
        assert (whole["content"], whole["stop"], whole["truncated"]) == ("one two three ", True, False)
        assert (whole["stop_type"], whole["stopping_word"]) == ("limit", "")
        assert (whole["tokens_evaluated"], whole["tokens_predicted"], whole["tokens_cached"]) == (8, 3, 11)
        timings = whole["timings"]
        assert (timings["prompt_n"], timings["predicted_n"], timings["prompt_ms"]) == (1, 3, 250.0)
        assert (timings["prompt_per_second"], timings["predicted_per_second"]) == (4.0, 6.0)

        text = HTTP.post(f"{url}/infill", json=requested | {"stream": True}).text
        assert "[DONE]" not in text
        *pieces, last = (json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: "))
        assert [each["content"] for each in pieces] == ["one ", "two ", "three "]
        assert [each["tokens_predicted"] for each in pieces] == [1, 2, 3]
        assert [each["stop"] for each in (*pieces, last)] == [False] * 3 + [True]
        assert last == whole | {"content": ""}

        # llama.vim names the fields that it reads.
        named = ["content", "timings/predicted_n", "truncated", "other", "content/other"]
        few = HTTP.post(f"{url}/infill", json=requested | {"response_fields": named}).json()
        assert few == {"content": whole["content"], "timings/predicted_n": 3, "truncated": False}

        engine.says, engine.stopped_by = ["some"], "word"
        stopped = HTTP.post(f"{url}/infill", json=GAP).json()
        assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", "word")
        engine.stopped_by = None
        assert HTTP.post(f"{url}/infill", json=GAP).json()["stop_type"] == "eos"


def test_refusals_name_the_field(engine: FakeEngine) -> None:
    with serving(create_app(engine, ServerConfig())) as url:
        for body, status, named in (
            (GAP, 400, "input_suffix"),  # the model has no marks
            ({"input_prefix": "a"}, 400, "input_suffix"),
            (GAP | {"n_predict": "many"}, 400, "n_predict"),
            (GAP | {"temperature": -1}, 400, "temperature"),
            (GAP | {"input_extra": [{"text": 1}]}, 400, "input_extra"),
            (GAP | {"model": "other"}, 404, "model"),
        ):
            answer = HTTP.post(f"{url}/infill", json=body)
            assert (answer.status_code, named in answer.text) == (status, True), (body, answer.text)
