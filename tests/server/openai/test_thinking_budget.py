"""Thinking budget of a request, and the tokens that a constrained answer reserves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from tool_model import QUESTION, TOOLS, started
from twofold.api.config import ServerConfig
from twofold.engine import Engine
from twofold.server.app import create_app
from twofold.text.chat.bounded_thinking import BoundedThinking

OPENED = {"messages": QUESTION, "chat_template_kwargs": {"thinks": True}, "temperature": 1.0}
CONFIG = ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Engine]]:
    engine = started(tmp_path_factory.mktemp("models"))
    with serving(create_app(engine, CONFIG)) as base:
        yield base, engine
    engine.close()


def answer(base: str, **body: Any) -> dict[str, Any]:
    response = HTTP.post(f"{base}/v1/chat/completions", json=OPENED | body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


@pytest.mark.parametrize("budget", [0, 7])
def test_the_budget_ends_the_thinking_and_changes_no_token_before(
    served: tuple[str, Engine], budget: int
) -> None:
    base, engine = served
    requested = {"seed": 1, "max_tokens": 40, "return_token_ids": True}
    free, held = answer(base, **requested), answer(base, **requested, thinking_token_budget=budget)
    end = engine.tokenizer.encode("</think>")
    assert held["token_ids"][:budget] == free["token_ids"][:budget]
    assert held["token_ids"][budget : budget + len(end)] == end
    assert free["message"]["content"] == ""
    assert held["message"]["content"]
    assert bool(held["message"]["reasoning"]) == (budget > 0)


@pytest.mark.parametrize("more", [{}, {"thinking_token_budget": 10_000}, {"top_p": 0.9}, {"logprobs": True}])
@pytest.mark.parametrize("form", ["choice", "call"])
def test_a_constrained_answer_keeps_half_of_its_tokens(
    served: tuple[str, Engine], form: str, more: dict[str, Any]
) -> None:
    """The model alone would think to the end."""
    base, _ = served
    requested: dict[str, Any] = {"guided_choice": ["yes", "no"], "max_tokens": 40}
    if form == "call":
        requested = {
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 120,
        }
    for seed in range(3):
        reply = answer(base, **requested | more, seed=seed)
        assert reply["message"]["reasoning"]
        if form == "choice":
            assert reply["message"]["content"] in ("yes", "no")
        else:
            assert reply["message"]["tool_calls"]


def test_a_batch_of_answers_with_budgets_is_what_each_is_alone(served: tuple[str, Engine]) -> None:
    base, _ = served
    requested = {"max_tokens": 60, "thinking_token_budget": 5, "guided_regex": "[a-z]{12}"}
    body = OPENED | requested | {"n": 3, "seed": 4}
    together = HTTP.post(f"{base}/v1/chat/completions", json=body).json()["choices"]
    alone = [answer(base, **requested, seed=4 + number) for number in range(3)]
    assert [each["message"] for each in together] == [each["message"] for each in alone]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": QUESTION, "thinking_token_budget": 5}),
        (
            "messages",
            {"model": "fake-tales", "max_tokens": 9, "messages": QUESTION,
             "thinking": {"type": "enabled", "budget_tokens": 5}},
        ),
        ("responses", {"input": "a king", "thinking_token_budget": 5}),
    ],
)  # fmt: skip
def test_every_api_has_a_budget(engine: FakeEngine, path: str, body: dict[str, Any]) -> None:
    engine.max_context = 4096
    with serving(create_app(engine, CONFIG)) as base:
        response = HTTP.post(f"{base}/v1/{path}", json=body)
        assert response.status_code == 200, response.text
        refused = HTTP.post(
            f"{base}/v1/chat/completions", json={"messages": QUESTION, "thinking_token_budget": -2}
        )
        assert refused.json()["error"]["param"] == "thinking_token_budget"
    bound = engine.requests[-1].constraint
    assert isinstance(bound, BoundedThinking)
    assert bound.budget == 5
    assert not bound.marks.opened


@pytest.mark.parametrize(("max_tokens", "budget"), [(1, 1), (30, 15), (None, 20_000 - 4096)])
def test_what_a_constrained_answer_keeps(engine: FakeEngine, max_tokens: int | None, budget: int) -> None:
    engine.max_context = 20_000 + len(QUESTION[0]["content"].split())
    body = {"messages": QUESTION, "guided_choice": ["yes", "no"], "max_tokens": max_tokens}
    with serving(create_app(engine, CONFIG)) as base:
        assert HTTP.post(f"{base}/v1/chat/completions", json=body).status_code == 200
        plain = {key: value for key, value in body.items() if key != "guided_choice"}
        bound = engine.requests[-1].constraint
        assert HTTP.post(f"{base}/v1/chat/completions", json=plain).status_code == 200
    assert isinstance(bound, BoundedThinking)
    assert bound.budget == budget
    assert engine.requests[-1].constraint is None
