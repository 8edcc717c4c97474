"""Token options of requests, through the openai client with the bundled model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import serving
from twofold.api.config import EngineConfig, ServerConfig
from twofold.engine import Engine
from twofold.models.bundled import bundled_model_path
from twofold.server.app import create_app

PROMPT = "Once upon a time there was a"
NEAR = 0.05
"""Between log probabilities of the same token, computed as part of a prompt and one by one: 0 on AVX2, where both take
the same kernels; kernels with tiles round in another order."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(model=str(bundled_model_path()), accelerator="none", cpu_threads=1, max_num_seqs=8)
    loaded = Engine.load(config)
    loaded.start()
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    with (
        serving(create_app(engine, ServerConfig(served_model_name=("tales",)))) as base,
        openai.OpenAI(base_url=f"{base}/v1", api_key="unused", max_retries=0, timeout=60) as made,
    ):
        yield made


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    extra = {"return_token_ids": True, "ignore_eos": True} | options.pop("extra_body", {})
    options = {"temperature": 0, "max_tokens": 8} | options
    return client.completions.create(model="tales", prompt=prompt, extra_body=extra, **options)


def ids_of(choice: Any) -> list[int]:
    return choice.model_extra["token_ids"]


@pytest.fixture(scope="module")
def greedy(client: openai.OpenAI) -> Any:
    return complete(client, logprobs=5).choices[0]


def test_a_greedy_answer_holds_the_likeliest_tokens(greedy):
    assert "".join(greedy.logprobs.tokens) == greedy.text
    for token, logprob, top in zip(
        greedy.logprobs.tokens, greedy.logprobs.token_logprobs, greedy.logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 5
        assert list(top.values()) == sorted(top.values(), reverse=True)
        assert next(iter(top.items())) == (token, logprob)
        assert sum(map(math.exp, top.values())) <= 1 + 1e-6
    assert [greedy.text[at:] for at in greedy.logprobs.text_offset] == [
        "".join(greedy.logprobs.tokens[at:]) for at in range(8)
    ]


def test_log_probabilities_do_not_depend_on_how_a_token_was_picked(client, greedy):
    hot = complete(
        client, logprobs=5, max_tokens=1, temperature=2.0, seed=3, top_p=0.5, presence_penalty=2.0
    ).choices[0]
    assert hot.logprobs.top_logprobs[0].items() >= greedy.logprobs.top_logprobs[0].items()


def test_echo_scores_an_answer_as_it_was_made(client, greedy):
    whole = [*client_ids(client), *ids_of(greedy)]
    scored = complete(client, [whole], echo=True, logprobs=1, max_tokens=0).choices[0]
    assert scored.finish_reason == "length"
    assert ids_of(scored) == []
    assert len(scored.logprobs.token_logprobs) == len(whole)
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.top_logprobs[0] is None
    assert scored.logprobs.token_logprobs[-8:] == pytest.approx(greedy.logprobs.token_logprobs, abs=NEAR)
    assert "".join(scored.logprobs.tokens) == scored.text
    assert scored.text.endswith(greedy.text)


def client_ids(client: openai.OpenAI) -> list[int]:
    return complete(client, max_tokens=1).choices[0].model_extra["prompt_token_ids"]


def test_a_streamed_answer_has_the_same_log_probabilities(client, greedy):
    tokens: list[str] = []
    logprobs: list[float] = []
    for chunk in complete(client, logprobs=5, stream=True):
        if chunk.choices[0].logprobs:
            tokens += chunk.choices[0].logprobs.tokens
            logprobs += chunk.choices[0].logprobs.token_logprobs
    assert len(tokens) == 8
    assert tokens == greedy.logprobs.tokens
    assert logprobs == pytest.approx(greedy.logprobs.token_logprobs, abs=NEAR)


def test_bias_forbids_and_forces_tokens(client, greedy):
    first = ids_of(greedy)[0]
    without = complete(client, logit_bias={str(first): -100}).choices[0]
    assert first not in ids_of(without)
    forced = complete(client, logit_bias={str(first): 100}).choices[0]
    assert ids_of(forced) == [first] * 8
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, logit_bias={"2000000": 1})
    assert caught.value.param == "logit_bias"


def test_a_stop_token_ends_the_answer_and_has_no_text(client, greedy):
    ids = ids_of(greedy)
    stop = next(token for token in ids[2:] if token not in ids[:2])
    at = ids.index(stop)
    stopped = complete(client, extra_body={"stop_token_ids": [stop]}, logprobs=0)
    assert stopped.choices[0].finish_reason == "stop"
    assert ids_of(stopped.choices[0]) == ids[: at + 1]
    assert stopped.choices[0].text == "".join(greedy.logprobs.tokens[:at])
    assert stopped.usage.completion_tokens == at + 1
    later = complete(client, extra_body={"stop_token_ids": [stop], "min_tokens": at + 2}).choices[0]
    assert len(ids_of(later)) >= at + 2
    assert stop not in ids_of(later)[: at + 1]


def test_min_tokens_forbid_end_tokens(client, engine):
    (end, *_) = sorted(engine.tokenizer.eos_token_ids)
    always = {"logit_bias": {str(end): 100}, "extra_body": {"ignore_eos": False}}
    assert ids_of(complete(client, **always).choices[0]) == [end]
    always["extra_body"]["min_tokens"] = 5
    held = complete(client, **always).choices[0]
    assert len(ids_of(held)) == 6
    assert end not in ids_of(held)[:5]


def test_bad_words_are_never_generated(client, greedy):
    word = next(token for token in greedy.logprobs.tokens if token.strip().isalpha() and token[0] == " ")
    kept_away = complete(client, max_tokens=32, extra_body={"bad_words": [word.strip()]}, logprobs=0).choices[
        0
    ]
    assert word not in kept_away.logprobs.tokens
    assert word in complete(client, max_tokens=32, logprobs=0).choices[0].logprobs.tokens


def test_choices_are_what_their_seeds_give_alone(client):
    sampled = {"temperature": 1.0, "max_tokens": 12}
    together = complete(client, n=4, seed=5, **sampled)
    alone = [complete(client, seed=5 + index, **sampled).choices[0].text for index in range(4)]
    assert [choice.text for choice in together.choices] == alone
    assert len(set(alone)) > 1
    assert together.usage.completion_tokens == 48
    best = complete(client, best_of=4, n=2, seed=5, logprobs=0, **sampled)
    ranked = sorted(
        complete(client, n=4, seed=5, logprobs=0, **sampled).choices,
        key=lambda choice: -sum(choice.logprobs.token_logprobs),
    )
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]


def test_several_prompts_are_answered_as_each_alone(client):
    prompts = [PROMPT, "The fox said", "Far away"]
    together = complete(client, prompts)
    assert [choice.text for choice in together.choices] == [
        complete(client, prompt).choices[0].text for prompt in prompts
    ]


def test_a_continued_message_is_extended(client, engine):
    turns = [{"role": "user", "content": "Tell a tale."}, {"role": "assistant", "content": PROMPT}]
    options = {"temperature": 0, "max_tokens": 8, "extra_body": {"continue_final_message": True}}
    answer = client.chat.completions.create(model="tales", messages=turns, **options)
    template = engine.tokenizer.apply_chat_template(turns, True)
    prompt = template[: template.rindex(PROMPT) + len(PROMPT)]
    raw = complete(client, prompt, extra_body={"add_special_tokens": False, "ignore_eos": False})
    assert answer.choices[0].message.content == raw.choices[0].text
    assert answer.usage.prompt_tokens == raw.usage.prompt_tokens


def test_running_work_is_reported_with_its_progress(client, engine):
    with complete(client, stream=True, max_tokens=400) as stream:
        first = next(iter(stream))
        (progress,) = engine.control.requests()
    assert progress.request.request_id == first.id
    assert progress.is_running
    prompt = len(progress.request.prompt_token_ids)
    assert progress.num_generated >= 1
    assert prompt <= progress.num_computed <= prompt + progress.num_generated
    assert progress.max_tokens == 400
    assert engine.config.max_num_seqs == 8


def test_the_speed_is_reported_in_seconds(client):
    chunks = list(complete(client, stream=True, extra_body={"return_speed": True}))
    (last,) = [chunk for chunk in chunks if chunk.choices[0].finish_reason]
    assert last.usage.completion_tokens == 8
    assert 0 < last.usage.model_extra["prefill_time"] < 60
    assert 0 < last.usage.model_extra["decode_time"] < 60
