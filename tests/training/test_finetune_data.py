"""Training data: which tokens are answers in each form of line, and what is said of lines that cannot be used."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from twofold.training.finetune.answers import AnswerTokens, Example
from twofold.training.finetune.batches import IGNORED, micro_batches
from twofold.training.finetune.data import BadLinesError, TrainingData, read_data

from tests.tiny_models.writing import CHATML_TEMPLATE, TinyModel, write_tiny_model

VOCABULARY = TinyModel().vocab_size
WITH_GENERATION = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' %}\n"
    "    {%- generation %}\n"
    "    {{- message['content'] + '<|im_end|>' }}\n"
    "    {%- endgeneration %}{{- '\n' }}"
    "{%- else %}{{- message['content'] + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
FORGETFUL = CHATML_TEMPLATE.replace(
    "message['content']",
    "(message['content'] if loop.last or message['role'] != 'assistant' else message['content'].split('</think>')[-1])",
)
"""Leaves out the thoughts of answers but the last, as reasoning models' templates do."""
CHAT = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def tokens_of(directory: Path, template: str | None = None) -> AnswerTokens:
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return AnswerTokens(directory, vocab_size=VOCABULARY)


def read(tmp_path: Path, tokens: AnswerTokens, *rows: Any, **more: Any) -> TrainingData:
    path = tmp_path / "data.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return read_data(path, tokens, **{"max_length": 200, "truncates": False} | more)


def parts(tokens: AnswerTokens, example: Example) -> list[tuple[str, bool]]:
    """The example's text in runs of tokens that are answers, and that are not."""
    runs: list[tuple[list[int], bool]] = []
    for token, is_answer in zip(example.ids, example.is_answer, strict=True):
        if not runs or runs[-1][1] != is_answer:
            runs.append(([], is_answer))
        runs[-1][0].append(token)
    return [(tokens.tokenizer.decode(ids, skip_special_tokens=False), is_answer) for ids, is_answer in runs]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


ONE_TURN = [(CHAT, False), ("a king<|im_end|>", True), ("\n", False)]
FORMS: dict[str, tuple[dict[str, Any], list[tuple[str, bool]]]] = {
    "messages": ({"messages": [user("the cat"), answer("a king")]}, ONE_TURN),
    "messages in parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}, answer("a king")]},
        ONE_TURN,
    ),
    "a question after the last answer": (
        {"messages": [user("the cat"), answer("a king"), user("and?")]},
        ONE_TURN,
    ),
    "several turns": (
        {"messages": [user("the cat"), answer("a king"), user("and?"), answer("the end")]},
        [
            (CHAT, False),
            ("a king<|im_end|>", True),
            ("\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n", False),
            ("the end<|im_end|>", True),
            ("\n", False),
        ],
    ),
    "control tokens in words are words": (
        {"messages": [user("the cat"), answer("a <|im_end|> king")]},
        [(CHAT, False), ("a <|im_end|> king<|im_end|>", True), ("\n", False)],
    ),
    "conversations": (
        {"conversations": [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "a king"}]},
        ONE_TURN,
    ),
    "conversations with a system message": (
        {
            "system": "in",
            "conversations": [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "a king"}],
        },
        [("<|im_start|>system\nin<|im_end|>\n" + CHAT, False), *ONE_TURN[1:]],
    ),
    "prompt and completion": (
        {"prompt": "the cat", "completion": " and a king"},
        [("the cat", False), (" and a king<|im_end|>", True)],
    ),
    "prompt and completion in messages": (
        {"prompt": [user("the cat"), answer("a king"), user("and?")], "completion": [answer("the end")]},
        [
            (f"{CHAT}a king<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n", False),
            ("the end<|im_end|>", True),
            ("\n", False),
        ],
    ),
    "text": ({"text": "the cat and a king"}, [("the cat and a king<|im_end|>", True)]),
}


@pytest.mark.parametrize("form", FORMS)
def test_answers_of_each_form(directory: Path, tmp_path: Path, form: str) -> None:
    tokens = tokens_of(directory)
    row, expected = FORMS[form]
    (example,) = read(tmp_path, tokens, row).examples
    assert parts(tokens, example) == expected


@pytest.mark.parametrize("form", [form for form in FORMS if FORMS[form][0].get("messages")])
def test_generation_blocks_mark_the_same_answers(tmp_path: Path, form: str) -> None:
    tokens = tokens_of(write_tiny_model(tmp_path / "model"), WITH_GENERATION)
    row, expected = FORMS[form]
    (example,) = read(tmp_path, tokens, row).examples
    assert parts(tokens, example) == expected


def test_answers_that_a_template_shortens_later_are_examples_of_their_own(tmp_path: Path) -> None:
    tokens = tokens_of(write_tiny_model(tmp_path / "model"), FORGETFUL)
    row = {
        "messages": [user("the cat"), answer("hm</think>a king"), user("and?"), answer("so</think>the end")]
    }
    first, second = read(tmp_path, tokens, row).examples
    assert parts(tokens, first) == [(CHAT, False), ("hm</think>a king<|im_end|>", True), ("\n", False)]
    shown = f"{CHAT}a king<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert parts(tokens, second) == [(shown, False), ("so</think>the end<|im_end|>", True), ("\n", False)]


BAD: dict[str, tuple[Any, str]] = {
    "not JSON": ("{", "not JSON: "),
    "not UTF-8": ("\udcff", "not JSON: "),
    "a list": ([1], "is [1], expected an object with messages"),
    "unknown keys": ({"question": 1}, "has the keys question, expected messages"),
    "empty answer": ({"messages": [user("a"), answer(" ")]}, "messages[1] is an empty answer"),
    "no answer": ({"messages": [user("a")]}, "so there is no answer to learn"),
    "no messages": ({"messages": []}, "messages is [], expected a list of messages"),
    "no role": ({"messages": [{"content": "a"}]}, "messages[0] is not an object with role and content"),
    "content": ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content is 3, expected text"),
    "speaker": (
        {"conversations": [{"from": "cat", "value": "a"}]},
        'conversations[0].from is "cat", expected one of',
    ),
    "no value": (
        {"conversations": [{"from": "gpt"}]},
        "conversations[0] is not an object with from and value",
    ),
    "empty completion": ({"prompt": "a", "completion": ""}, "completion is empty"),
    "empty text": ({"text": ""}, "text is empty"),
    "number as text": ({"text": 3}, "text is 3, expected text"),
    "too long": ({"text": "x" * 300}, "301 tokens, expected at most 200; raise --max-length"),
    "surrogate": ({"text": "a\ud800"}, "not valid Unicode"),
    "tools": ({"tools": 3, "messages": []}, "tools is 3, expected a list of objects"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_lines_are_named(directory: Path, tmp_path: Path, case: str) -> None:
    row, message = BAD[case]
    path = tmp_path / "data.jsonl"
    lines = ['{"text": "the cat"}', "", row if isinstance(row, str) else json.dumps(row)]
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    with pytest.raises(BadLinesError) as raised:
        read_data(path, tokens_of(directory), max_length=200, truncates=False)
    (line,) = raised.value.lines
    assert line.startswith(f"{path}:3: ")
    assert message in line


def test_every_bad_line_is_named_and_an_empty_file_too(directory: Path, tmp_path: Path) -> None:
    tokens = tokens_of(directory)
    with pytest.raises(BadLinesError) as raised:
        read(tmp_path, tokens, "{", {"text": "the"}, "[]")
    assert [line.split(":")[1] for line in raised.value.lines] == ["1", "3"]
    with pytest.raises(BadLinesError) as raised:
        read(tmp_path, tokens, "")
    assert "holds no examples" in raised.value.lines[0]


def test_truncated_lines_keep_their_begin(directory: Path, tmp_path: Path) -> None:
    tokens = tokens_of(directory)
    data = read(tmp_path, tokens, {"text": "x" * 300}, truncates=True)
    assert (len(data.examples[0]), data.num_truncated) == (200, 1)
    with pytest.raises(BadLinesError) as raised:
        read(tmp_path, tokens, {"prompt": "x" * 300, "completion": "y"}, truncates=True)
    assert "no answer begins within its first 200 tokens" in raised.value.lines[0]


def examples(*lengths: int) -> list[Example]:
    return [Example(tuple(range(n)), (False, *[True] * (n - 1))) for n in lengths]


def test_packed_rows_hold_every_example_once_with_positions_of_its_own() -> None:
    batches = micro_batches(examples(5, 9, 3, 7, 4, 12), 12, packs=True, seed=0)
    found = []
    for batch in batches:
        assert batch["input_ids"].shape == batch["position_ids"].shape == batch["labels"].shape
        assert batch["input_ids"].shape[1] <= 12
        assert torch.equal(batch["input_ids"], batch["position_ids"])  # the ids here are the positions
        begins = batch["position_ids"] == 0
        assert torch.equal(batch["labels"], batch["input_ids"].masked_fill(begins, IGNORED))
        places = [*begins[0].nonzero()[:, 0].tolist(), batch["input_ids"].shape[1]]
        found += [end - begin for begin, end in itertools.pairwise(places)]
    assert sorted(found) == [3, 4, 5, 7, 9, 12]
    assert len(batches) == 4


def test_padded_rows_are_of_like_length_and_padding_has_no_loss() -> None:
    batches = micro_batches(examples(5, 9, 3, 7, 4, 12), 12, packs=False, seed=0)
    assert [batch["attention_mask"].sum(1).tolist() for batch in batches] == [[3, 4], [5], [7], [9], [12]]
    assert batches[0]["labels"].tolist() == [[IGNORED, 1, 2, IGNORED], [IGNORED, 1, 2, 3]]
