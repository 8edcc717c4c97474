"""Pictures in requests of every API: the answers are those of transformers' whole multimodal model."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from seeing_model import NUM_TOKENS, Seeing

from tests.tiny_models.pictures import picture

TEXT = "what is it?"
PICTURE = picture(50, 37)


def in_base64(seed: int = 0, form: str = "PNG") -> str:
    file = io.BytesIO()
    picture(50, 37, seed).save(file, form)
    return base64.b64encode(file.getvalue()).decode()


def data_url(seed: int = 0) -> str:
    return f"data:image/png;base64,{in_base64(seed)}"


@pytest.fixture(scope="module")
def client(seeing: Seeing) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def expected(seeing: Seeing) -> tuple[str, int]:
    content = [{"type": "image"}, {"type": "text", "text": TEXT}]
    return seeing.expected([{"role": "user", "content": content}], [PICTURE])


def chat(seeing: Seeing, content: Any, *before: Any, **further: Any) -> Any:
    body = {"messages": [*before, {"role": "user", "content": content}], "max_tokens": NUM_TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "model": seeing.folder.name, **further}
    return httpx.post(f"{seeing.url}/v1/chat/completions", json=body, timeout=120).json()


TEXT_PART = {"type": "text", "text": TEXT}
FORMS: dict[str, Callable[[Seeing], list[Any]]] = {
    "OpenAI": lambda seeing: [{"type": "image_url", "image_url": {"url": data_url(), "detail": "high"}}, TEXT_PART],
    "a URL as text": lambda seeing: [{"type": "image_url", "image_url": data_url()}, TEXT_PART],
    "without a type": lambda seeing: [{"image_url": {"url": data_url()}}, TEXT_PART],
    "Responses' part": lambda seeing: [{"type": "input_image", "image_url": data_url()}, TEXT_PART],
    "MCP": lambda seeing: [{"type": "image", "data": in_base64(), "mimeType": "image/png"}, TEXT_PART],
    "LangChain": lambda seeing: [
        {"type": "image", "source_type": "base64", "data": in_base64(), "mime_type": "image/png"}, TEXT_PART,
    ],
    "transformers": lambda seeing: [{"type": "image", "image": data_url()}, TEXT_PART],
    "a file": lambda seeing: [{"type": "file", "file": {"file_data": data_url()}}, TEXT_PART],
    "Anthropic's part": lambda seeing: [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": in_base64()}}, TEXT_PART,
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_picture_is_read(seeing: Seeing, expected: tuple[str, int], form: str) -> None:
    answer = chat(seeing, FORMS[form](seeing))
    assert answer["choices"][0]["message"]["content"] == expected[0]
    assert answer["usage"]["prompt_tokens"] == expected[1]


def test_openai_streams(seeing: Seeing, client: openai.OpenAI, expected: tuple[str, int]) -> None:
    content: Any = [{"type": "image_url", "image_url": {"url": data_url()}}, TEXT_PART]
    stream = client.chat.completions.create(
        model=seeing.folder.name,
        messages=[{"role": "user", "content": content}],
        max_tokens=NUM_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == expected[0]


def test_responses(seeing: Seeing, client: openai.OpenAI, expected: tuple[str, int]) -> None:
    content: Any = [
        {"type": "input_image", "image_url": data_url(), "detail": "auto"},
        {"type": "input_text", "text": TEXT},
    ]
    answer = client.responses.create(
        model=seeing.folder.name,
        input=[{"role": "user", "content": content}],
        max_output_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.output_text == expected[0]
    assert answer.usage is not None
    assert answer.usage.input_tokens == expected[1]


def test_ollama(seeing: Seeing, expected: tuple[str, int]) -> None:
    asked = ollama.Client(seeing.url)
    options = {"num_predict": NUM_TOKENS, "temperature": 0}
    message = {"role": "user", "content": TEXT, "images": [in_base64()]}
    answer = asked.chat(seeing.folder.name, messages=[message], options=options)
    assert expected[0].startswith(str(answer.message.content))
    generated = asked.generate(seeing.folder.name, TEXT, images=[in_base64()], options=options)
    assert generated.response == answer.message.content


def test_ollama_puts_pictures_before_the_text_or_where_it_has_marks(seeing: Seeing) -> None:
    asked = ollama.Client(seeing.url)
    content = [{"type": "image"}, {"type": "text", "text": "see "}, {"type": "image"}, TEXT_PART]
    known, _ = seeing.expected([{"role": "user", "content": content}], [picture(50, 37, 1), PICTURE])
    message = {"role": "user", "content": f"see [img]{TEXT}", "images": [in_base64(), in_base64(1)]}
    answer = asked.chat(
        seeing.folder.name, messages=[message], options={"num_predict": NUM_TOKENS, "temperature": 0}
    )
    assert known.startswith(str(answer.message.content))


def test_anthropic_reads_a_screenshot_in_a_tool_result(seeing: Seeing) -> None:
    asked = anthropic.Anthropic(base_url=seeing.url, api_key="unused", max_retries=0, timeout=120)
    source: Any = {"type": "base64", "media_type": "image/png", "data": in_base64(1)}
    messages: Any = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "shot", "input": {}}]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "a.png"}, {"type": "image", "source": source}],
                }
            ],
        },
    ]
    counted = asked.messages.count_tokens(model=seeing.folder.name, messages=messages)
    answer = asked.messages.create(model=seeing.folder.name, messages=messages, max_tokens=4)
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted.input_tokens
    with_other = asked.messages.create(
        model=seeing.folder.name,
        messages=[*messages[:2], {"role": "user", "content": "no tool"}],
        max_tokens=4,
    )
    assert with_other.usage.input_tokens < counted.input_tokens - 10


@pytest.mark.parametrize(
    "size", [(50, 37), (210, 160)], ids=["parsed here", "parsed in a process of its own"]
)
def test_a_large_body_keeps_its_pictures(seeing: Seeing, size: tuple[int, int]) -> None:
    file = io.BytesIO()
    picture(*size).save(file, "PNG")
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file.getvalue()).decode()}
    content = [{"type": "image", "source": source}, TEXT_PART]
    body = {"model": seeing.folder.name, "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
    answer = httpx.post(f"{seeing.url}/v1/messages", json=body, timeout=120).json()
    expected = seeing.expected(
        [{"role": "user", "content": [{"type": "image"}, TEXT_PART]}], [picture(*size)]
    )
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected[1]


def test_pictures_stand_where_they_were_sent(seeing: Seeing) -> None:
    urls = [data_url(seed) for seed in (0, 1, 2)]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    system = {"role": "system", "content": "be brief"}
    first = {"role": "user", "content": [parts[0], {"type": "text", "text": "one"}, parts[1]]}
    reply = {"role": "assistant", "content": "seen"}
    answer = chat(seeing, [{"type": "text", "text": "and"}, parts[2]], system, first, reply)

    def bare(message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        if isinstance(content, str):
            return {"role": message["role"], "content": [{"type": "text", "text": content}]}
        return {
            "role": message["role"],
            "content": [{"type": "image"} if part["type"] == "image_url" else part for part in content],
        }

    messages = [
        system,
        first,
        reply,
        {"role": "user", "content": [{"type": "text", "text": "and"}, parts[2]]},
    ]
    expected = seeing.expected(
        [bare(each) for each in messages], [picture(50, 37, seed) for seed in (0, 1, 2)]
    )
    assert answer["choices"][0]["message"]["content"] == expected[0]


def test_the_next_turn_computes_neither_encoder_nor_prefill_of_its_picture(seeing: Seeing) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(9)}}
    question = [part, {"type": "text", "text": f"{TEXT} " * 20}]
    first = chat(seeing, question)
    reply = first["choices"][0]["message"]["content"]
    before = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    second = chat(seeing, "and now?", *before)
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] - 3 * seeing.engine.config.page_size
    assert (
        second["usage"]["prompt_tokens_details"]["image_tokens"]
        == first["usage"]["prompt_tokens_details"]["image_tokens"]
        > 0
    )


def test_control_tokens_of_pictures_typed_by_a_user_are_text(seeing: Seeing) -> None:
    typed = "<|vision_start|><|image_pad|><|vision_end|>"
    answer = chat(seeing, [{"type": "text", "text": typed}, {"type": "image", "image": data_url()}])
    assert "error" not in answer
    assert chat(seeing, typed)["usage"]["prompt_tokens_details"].get("image_tokens", 0) == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "image", "image": "aGVsbG8="}], ("messages[0].content", "no picture")),
        ([{"type": "image", "image": "not base64!"}], ("messages[0].content", "expected as a data URL")),
        ([{"type": "image", "image": "data:image/png,abc"}], ("not base64",)),
        ([{"type": "image", "image": "http://example.org/a.png"}], ("--allowed-media-domains",)),
        ([{"type": "image", "image": "file:///etc/passwd"}], ("--allowed-local-media-path",)),
        ([{"type": "image", "image": data_url(n)} for n in range(5)], ("at most 4", "--limit-mm-per-prompt")),
    ],
)
def test_refusals_name_the_field_and_the_reason(
    seeing: Seeing, content: list[Any], words: tuple[str, ...]
) -> None:
    error = chat(seeing, content)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "messages[0].content"
    for word in words:
        assert word in error["message"]


def test_a_prompt_with_pictures_is_not_truncated(seeing: Seeing) -> None:
    error = chat(seeing, FORMS["OpenAI"](seeing), truncate_prompt_tokens=20)["error"]
    assert "would be truncated to 20" in error["message"]


def test_a_file_below_the_allowed_directory_is_read(seeing: Seeing, expected: tuple[str, int]) -> None:
    file = seeing.folder / "a picture.png"
    PICTURE.save(file)
    answer = chat(seeing, [{"type": "image_url", "image_url": {"url": file.as_uri()}}, TEXT_PART])
    assert answer["choices"][0]["message"]["content"] == expected[0]
