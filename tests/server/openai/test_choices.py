"""Several choices per request, and the logprobs of their tokens, with the fake engine."""

from __future__ import annotations

import json
import math
import socket
from dataclasses import replace
from typing import Any

import openai
import pytest
from fake_engine import FakeEngine
from live_server import HTTP, receive_until, serving
from twofold.api.config import ServerConfig
from twofold.api.types import SamplingParams, TokenLogprob
from twofold.server.app import create_app
from twofold.server.openai.logprobs import CompletionLogprobs, TokenNames, chat_logprobs

MODEL = "fake-tales"
WAIT_S = 20


@pytest.fixture
def engine():
    fake = FakeEngine(max_running=16)
    yield fake
    fake.close()


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    return client.completions.create(model=MODEL, prompt=prompt, **options)


def streamed_texts(chunks: Any, num_choices: int) -> list[str]:
    texts = [""] * num_choices
    for chunk in chunks:
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] += text or ""
    return texts


def test_n_choices_draw_with_seeds_that_follow_each_other(client, engine):
    engine.rotates = True
    answer = ask(client, "a b c", n=3, seed=1)
    texts = ["b c a ", "c a b ", "a b c "]
    assert [(choice.index, choice.message.content) for choice in answer.choices] == list(enumerate(texts))
    assert [request.sampling.seed for request in engine.requests] == [1, 2, 3]
    assert len({request.request_id for request in engine.requests}) == 3
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 9)
    alone = ask(client, "a b c", seed=1)
    assert alone.choices[0].message.content == texts[0]
    options = {"include_usage": True}
    chunks = list(ask(client, "a b c", n=3, seed=1, stream=True, stream_options=options))
    assert streamed_texts(chunks, 3) == texts
    ends = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason == "stop"]
    assert sorted(ends) == [0, 1, 2]
    assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == [12]


def test_without_a_seed_the_engine_is_left_to_draw_its_own(client, engine):
    ask(client, "a", n=2)
    assert [request.sampling.seed for request in engine.requests] == [None, None]


def test_the_servers_seed_is_the_first_choices(engine):
    with serving(create_app(engine, ServerConfig(), sampling_defaults=SamplingParams(seed=7))) as url:
        HTTP.post(f"{url}/v1/completions", json={"prompt": "a", "n": 2})
    assert [request.sampling.seed for request in engine.requests] == [7, 8]


@pytest.mark.parametrize("prompts", [["a b", "c"], [[0, 1], [2]]])
def test_choices_of_several_prompts_come_prompt_by_prompt(client, engine, prompts):
    engine.tokenizer.encode("a b c")
    engine.rotates = True
    answer = complete(client, prompts, n=2, seed=0)
    texts = ["a b ", "b a ", "c ", "c "]
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(texts))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)
    assert streamed_texts(complete(client, prompts, n=2, seed=0, stream=True), 4) == texts


def test_best_of_gives_the_likeliest_answers_and_counts_all(client, engine):
    # Words 0 to 3 are ever less likely: the answer that begins latest is the worst, cut after one word.
    engine.rotates = True
    answer = complete(client, "a b c d", best_of=3, n=2, seed=1, max_tokens=1)
    assert [choice.text for choice in answer.choices] == ["b ", "c "]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.logprobs for choice in answer.choices] == [None, None]
    assert answer.usage.completion_tokens == 3
    reversed_seeds = complete(client, "d c b a", best_of=3, n=1, seed=0, max_tokens=1)
    assert reversed_seeds.choices[0].text == "b "


def test_metrics_count_a_prompt_once(client, url):
    ask(client, "a b c", n=3)
    lines = HTTP.get(f"{url}/metrics").text.splitlines()
    assert f'vllm:prompt_tokens_total{{model_name="{MODEL}"}} 3' in lines
    assert f'vllm:generation_tokens_total{{model_name="{MODEL}"}} 9' in lines


def test_all_choices_get_a_place_or_none(client, engine, url):
    engine.config = replace(engine.config, max_num_seqs=2)
    engine.hold.clear()
    response = HTTP.post(f"{url}/v1/completions", json={"prompt": "a b", "n": 3})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert engine.idle.wait(WAIT_S), "the two that had a place gave it back"
    assert sorted(engine.cancelled) == sorted(request.request_id for request in engine.requests)
    engine.hold.set()
    assert HTTP.post(f"{url}/v1/completions", json={"prompt": "a b", "n": 2}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_cancels_every_choice(engine, url, stream):
    engine.hold.clear()
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps({"prompt": ["a b", "c d"], "n": 2, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        assert engine.started.wait(WAIT_S)
        if stream:
            receive_until(connection, b'"c "')
    assert engine.idle.wait(WAIT_S)
    assert len(set(engine.cancelled)) == 4


def test_one_failed_choice_fails_the_answer(client, engine, url):
    engine.fail_after_words = 1
    response = HTTP.post(f"{url}/v1/completions", json={"prompt": "a b", "n": 2})
    assert response.status_code == 500
    stream = HTTP.post(f"{url}/v1/completions", json={"prompt": "a b", "n": 2, "stream": True}).text
    assert stream.count('"error"') == 1
    assert stream.endswith("\n\ndata: [DONE]\n\n")


def test_every_new_sampling_field_arrives(client, engine):
    engine.tokenizer.encode("x y z")
    extra = {"stop_token_ids": [9, 8, 9], "min_tokens": 2, "bad_words": ["y", " z x"]}
    ask(client, "x", logit_bias={"1": -100, "0": 2.5}, logprobs=True, top_logprobs=3, extra_body=extra)
    sampling = engine.requests[-1].sampling
    assert sampling.stop_token_ids == (9, 8)
    assert sampling.min_tokens == 2
    assert sampling.bad_words == ((1,), (2, 0))
    assert sampling.logit_bias == ((0, 2.5), (1, -100.0))
    assert (sampling.logprobs, sampling.prompt_logprobs) == (3, None)


def test_bad_words_are_tokenised_with_and_without_a_space(engine):
    encoded: list[str] = []
    encode = engine.tokenizer.encode

    def encode_and_report(text: str, *, add_special_tokens: bool = False) -> list[int]:
        encoded.append(text)
        return [len(encoded)] if text.strip() in ("fox", "") else encode(text)

    engine.tokenizer.encode = encode_and_report
    with serving(create_app(engine, ServerConfig())) as url:
        body = {"prompt": ["a", "b"], "bad_words": ["fox", "\n"]}
        assert HTTP.post(f"{url}/v1/completions", json=body).status_code == 200
    assert sorted(encoded) == sorted(["a", "b", "fox", " fox", "\n", " \n"]), "once for all prompts"
    assert len(engine.requests[-1].sampling.bad_words) == 4


def test_completions_without_max_tokens_have_sixteen(client, engine):
    complete(client, "a b")
    assert engine.requests[-1].sampling.max_tokens == 16


def test_chat_logprobs_have_openais_shape(client, engine):
    answer = ask(client, "a b", logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["a ", "b "]
    assert [entry.logprob for entry in content] == [-0.25, -0.5]
    assert content[0].bytes == list(b"a ")
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("b ", -0.125), ("a ", -0.25)]
    assert content[0].top_logprobs[1].bytes == list(b"a ")
    assert answer.choices[0].logprobs.refusal is None
    chunks = ask(client, "a b", logprobs=True, top_logprobs=2, stream=True)
    streamed = [
        entry
        for chunk in chunks
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert streamed == content
    without_top = ask(client, "a b", logprobs=True).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in without_top] == [[], []]
    assert ask(client, "a b").choices[0].logprobs is None


def test_completions_logprobs_have_openais_shape(client, engine):
    engine.tokenizer.encode("a b c d")
    logprobs = complete(client, "b c", logprobs=1).choices[0].logprobs
    assert logprobs.tokens == ["b ", "c "]
    assert logprobs.token_logprobs == [-0.5, -0.75]
    assert logprobs.text_offset == [0, 2]
    assert logprobs.top_logprobs == [{"c ": -0.375, "b ": -0.5}, {"d ": -0.625, "c ": -0.75}]
    zero = complete(client, "b c", logprobs=0).choices[0].logprobs
    assert zero.top_logprobs == [{"b ": -0.5}, {"c ": -0.75}]
    named = complete(client, "b", logprobs=0, extra_body={"return_tokens_as_token_ids": True})
    assert named.choices[0].logprobs.tokens == ["token_id:1"]


def test_echo_scores_the_prompt(client, engine):
    engine.tokenizer.encode("a b c d")
    scored = complete(client, "b c", echo=True, logprobs=1, max_tokens=0)
    choice = scored.choices[0]
    assert choice.text == "b c"
    assert choice.finish_reason == "length"
    assert choice.logprobs.tokens == ["b ", "c "]
    assert choice.logprobs.token_logprobs == [None, -0.75]
    assert choice.logprobs.top_logprobs == [None, {"d ": -0.625, "c ": -0.75}]
    assert scored.usage.completion_tokens == 0
    longer = complete(client, [[1, 2], [3]], echo=True, logprobs=0, max_tokens=1)
    assert [choice.text for choice in longer.choices] == ["b c b ", "d d "]
    assert longer.choices[0].logprobs.token_logprobs == [None, -0.75, -0.5]
    assert longer.choices[0].logprobs.text_offset == [0, 2, 4]
    plain = complete(client, "b c", echo=True, max_tokens=1)
    assert plain.choices[0].text == "b cb "
    assert engine.requests[-1].sampling.prompt_logprobs is None


@pytest.mark.parametrize(
    "options", [{}, {"logprobs": 0}, {"logprobs": 2, "n": 2}, {"max_tokens": 0, "logprobs": 1}]
)
def test_a_streamed_echo_is_the_whole_one_in_pieces(client, engine, options):
    whole = complete(client, ["b c", "a"], echo=True, **options)
    chunks = list(complete(client, ["b c", "a"], echo=True, stream=True, **options))
    assert streamed_texts(chunks, len(whole.choices)) == [choice.text for choice in whole.choices]
    for choice in whole.choices:
        pieces = [
            c.logprobs for chunk in chunks for c in chunk.choices if c.index == choice.index and c.logprobs
        ]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            expected = getattr(choice.logprobs, name) if choice.logprobs else []
            assert [value for piece in pieces for value in getattr(piece, name)] == expected


def test_prompt_logprobs_are_vllms(client, engine):
    engine.tokenizer.encode("a b c")
    extra = {"prompt_logprobs": 1}
    choice = complete(client, "b c", extra_body=extra).choices[0]
    expected = [
        None,
        {
            "2": {"logprob": -0.75, "rank": None, "decoded_token": "c "},
            "3": {"logprob": -0.625, "rank": 1, "decoded_token": "<3> "},
        },
    ]
    assert choice.model_extra["prompt_logprobs"] == expected
    assert ask(client, "b c", extra_body=extra).model_extra["prompt_logprobs"] == expected
    assert choice.logprobs is None


def test_token_ids_accompany_the_text(client, engine):
    extra = {"return_token_ids": True}
    choice = complete(client, [5, 6, 7], max_tokens=2, extra_body=extra).choices[0]
    assert choice.model_extra == {"prompt_token_ids": [5, 6, 7], "token_ids": [5, 6]}
    chunks = list(complete(client, [5, 6, 7], max_tokens=2, stream=True, extra_body=extra))
    assert [i for chunk in chunks for i in chunk.choices[0].model_extra.get("token_ids", [])] == [5, 6]
    assert [c.choices[0].model_extra.get("prompt_token_ids") for c in chunks] == [[5, 6, 7], None, None]
    assert chunks[-1].choices[0].model_extra == {"token_ids": []}
    answer = ask(client, "a b", extra_body=extra)
    assert answer.model_extra["prompt_token_ids"] == answer.choices[0].model_extra["token_ids"] == [0, 1]
    chunks = list(ask(client, "a b", stream=True, extra_body=extra))
    assert [i for chunk in chunks for i in chunk.choices[0].model_extra.get("token_ids", [])] == [0, 1]
    assert [chunk.model_extra.get("prompt_token_ids") for chunk in chunks] == [[0, 1], None, None, None]
    assert chunks[-1].choices[0].model_extra == {"token_ids": []}


def test_the_speed_is_reported_with_the_finish_reason(client, engine):
    for options in ({}, {"stream_options": {"include_usage": True}}):
        extra = {"return_speed": True}
        chunks = list(ask(client, "a b", stream=True, extra_body=extra, **options))
        (last,) = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
        usage = last.usage.model_dump(exclude_none=True)
        assert usage == {
            # One of two was computed: prompt_tokens / prefill_time is the speed.
            "prompt_tokens": 1,
            "completion_tokens": 2,
            "total_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 1},
            "prefill_time": 0.25,
            "decode_time": 0.5,
        }
    assert ask(client, "a b", extra_body=extra).usage.model_extra == {
        "prefill_time": 0.25,
        "decode_time": 0.5,
    }
    assert (ask(client, "a b").usage.prompt_tokens, ask(client, "a b").usage.model_extra) == (2, {})


def test_continuous_usage_counts_as_it_goes(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(client, "a b c", stream=True, stream_options=options))
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("extra", "rendered"),
    [
        ({}, "a b"),
        ({"chat_template_kwargs": {"mood": "sad", "unread": 1}}, "mood=sad a b"),
        ({"reasoning_effort": "low"}, "reasoning_effort=low a b"),
        ({"add_generation_prompt": False}, "a b OPEN"),
        ({"continue_final_message": True}, "a b CONTINUE"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "a b CONTINUE"),
        ({"truncate_prompt_tokens": 1}, "b"),
        ({"truncate_prompt_tokens": 9}, "a b"),
        ({"truncate_prompt_tokens": 1, "truncation_side": "left"}, "b"),
        ({"truncate_prompt_tokens": 1, "truncation_side": "right"}, "a"),
    ],
)
def test_chat_template_options_reach_the_template(client, extra, rendered):
    assert ask(client, "a b", extra_body=extra).choices[0].message.content == rendered + " "


@pytest.mark.parametrize(
    ("variables", "fields", "rendered"),
    [
        ("reasoning_effort", {"reasoning_effort": "low"}, "reasoning_effort=low"),
        ("reasoning_effort", {"think": "low"}, "reasoning_effort=low"),
        ("reasoning_effort", {"reasoning": {"effort": "low"}}, "reasoning_effort=low"),
        ("reasoning_effort", {"think": True}, None),
        ("enable_thinking", {"reasoning_effort": "low"}, "enable_thinking=True"),
        ("enable_thinking", {"reasoning_effort": "none"}, "enable_thinking=False"),
        ("enable_thinking", {"enable_thinking": False}, "enable_thinking=False"),
        ("enable_thinking", {"think": False}, "enable_thinking=False"),
        ("enable_thinking", {"reasoning_effort": "low", "think": False}, "enable_thinking=False"),
        ("enable_thinking", {"thinking": {"type": "disabled"}}, "enable_thinking=False"),
        ("thinking", {"think": True}, "thinking=True"),
        ("verbosity", {"verbosity": "low"}, "verbosity=low"),
        (
            "enable_thinking",
            {"think": False, "chat_template_kwargs": {"enable_thinking": True}},
            "enable_thinking=True",
        ),
        ("mood", {"reasoning_effort": "low"}, None),
        ("mood", {"verbosity": "low"}, None),
        ("mood", {"think": False}, None),
        ("mood", {"enable_thinking": False}, None),
    ],
)
def test_thinking_and_verbosity_become_what_the_template_reads(
    client, engine, caplog, variables, fields, rendered
):
    engine.tokenizer.template_variables = frozenset({variables})
    # A line in the log is written once for each template.
    engine.tokenizer.chat_template = f"{variables} {fields}"
    answers = [ask(client, "a", extra_body=fields).choices[0].message.content for _ in range(2)]
    assert answers == [f"{rendered} a " if rendered else "a "] * 2
    logged = [record.getMessage() for record in caplog.records if record.name == "twofold.server"]
    ignored = [f"{name} is ignored: this model's chat template has no variable for it" for name in fields]
    assert logged == ([] if rendered else ignored)


class ByteTokenizer:
    """Tokens of bytes that are no characters by themselves; 9 is special."""

    special_token_ids = frozenset({9})

    def token_bytes(self, token_id: int) -> bytes:
        return {0: b"a", 1: "é".encode()[:1], 2: "é".encode()[1:], 3: b" b", 9: b"<s>"}[token_id]


def test_halves_of_characters_have_names_of_their_own_and_offsets_count_characters():
    names = TokenNames(ByteTokenizer())
    entries = [TokenLogprob(token_id, -1.0) for token_id in (0, 1, 2, 3, 9)]
    body = CompletionLogprobs(names).of_answer(entries)
    assert body["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", " b", "<s>"]
    assert body["text_offset"] == [0, 1, 1, 2, 4]
    chat = chat_logprobs(names, [TokenLogprob(1, -math.inf)])["content"][0]
    assert chat == {"token": "bytes:\\xc3", "logprob": -9999.0, "bytes": [0xC3], "top_logprobs": []}


@pytest.mark.parametrize(("text", "offsets"), [("a b", [0, 0, 1]), ("<s>a b", [0, 3, 4])])
def test_tokens_that_the_tokenizer_put_before_a_prompt_take_no_characters(text, offsets):
    names = TokenNames(ByteTokenizer())
    body = CompletionLogprobs(names).of_prompt([9, 0, 3], [None, *[TokenLogprob(0, -1.0)] * 2], text)
    assert body["text_offset"] == offsets
