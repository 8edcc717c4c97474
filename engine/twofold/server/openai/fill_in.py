"""Prompts for filling in the middle: the text before a gap and the text after it, between the model's marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from twofold.api.errors import RequestError
from twofold.server.bridge.models.protocol import ServingTokenizer


@dataclass(frozen=True)
class FillMarks:
    """Tokens around the two texts of one family of models."""

    prefix: str
    suffix: str
    middle: str = ""
    """After both texts; empty: the family has none."""
    suffix_first: bool = False


_FAMILIES: Final = (
    FillMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite 4
    FillMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    FillMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite 3
    FillMarks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    FillMarks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    FillMarks("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    FillMarks("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)
_ENDS: Final = (
    *("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    *("<｜end▁of▁sentence｜>", "<fim_pad>", "<file_sep>", "<repo_name>", "▁<EOT>", "</s>"),
)
"""Tokens after the text of a gap, of which chat models declare only some."""


_REPOSITORY_MARKS: Final = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILE_MARKS: Final = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<filename>")
"""Marks of Qwen, StarCoder 2 and Granite, CodeGemma, StarCoder; the repository's and a file's name follow them."""


def fill_marks(tokenizer: ServingTokenizer) -> FillMarks | None:
    """The model's marks; None: it has none."""
    for marks in _FAMILIES:
        if all(tokenizer.token_id(mark) is not None for mark in _written(marks)):
            return marks
    return None


def fill_prompt(
    prefix: Sequence[int], suffix: str, tokenizer: ServingTokenizer, *, begins: bool, field: str = "suffix"
) -> list[int]:
    """Token ids of a prompt whose answer belongs between `prefix` and `suffix`.

    begins: with the begin-of-text token. field: name of the suffix in the request.

    Raises:
        RequestError: the model has no marks.
    """
    marks = fill_marks(tokenizer)
    if marks is None:
        remedy = "leave suffix out" if field == "suffix" else "serve a model that has them"
        raise RequestError(
            f"{field}: this model's tokenizer has no marks for text before and after a gap; {remedy}",
            param=field,
        )
    before = [_token(tokenizer, marks.prefix), *prefix]
    after = [_token(tokenizer, marks.suffix), *tokenizer.encode(suffix)]
    texts = [*after, *before] if marks.suffix_first else [*before, *after]
    begin = tokenizer.encode("", add_special_tokens=True)[:1] if begins else []
    return [*begin, *texts, *([_token(tokenizer, marks.middle)] if marks.middle else [])]


def file_tokens(files: Sequence[tuple[str, str]], tokenizer: ServingTokenizer) -> list[int]:
    """Token ids of other files (name, text) before the file with the gap, in llama.cpp's form; empty without files."""
    if not files:
        return []
    token_ids: list[int] = []
    if (repository := _first_token(_REPOSITORY_MARKS, tokenizer)) is not None:
        token_ids += [repository, *tokenizer.encode("myproject\n")]
    mark = _first_token(_FILE_MARKS, tokenizer)
    for name, text in files:
        head = (
            tokenizer.encode("\n\n--- snippet ---\n\n")
            if mark is None
            else [mark, *tokenizer.encode(f"{name}\n")]
        )
        token_ids += [*head, *tokenizer.encode(text)]
    return token_ids if mark is None else [*token_ids, mark, *tokenizer.encode("filename\n")]


def fill_end_tokens(tokenizer: ServingTokenizer) -> tuple[int, ...]:
    """Tokens that end the text of a gap."""
    marks = fill_marks(tokenizer)
    names = (*_ENDS, *(() if marks is None else _written(marks)))
    found = (tokenizer.token_id(name) for name in names)
    return tuple(token for token in found if token is not None and token in tokenizer.special_token_ids)


def _written(marks: FillMarks) -> list[str]:
    return [mark for mark in (marks.prefix, marks.suffix, marks.middle) if mark]


def _first_token(marks: Sequence[str], tokenizer: ServingTokenizer) -> int | None:
    """The first of these tokens that the model has."""
    found = (tokenizer.token_id(mark) for mark in marks)
    return next((token for token in found if token is not None), None)


def _token(tokenizer: ServingTokenizer, mark: str) -> int:
    token = tokenizer.token_id(mark)
    assert token is not None, mark
    return token
