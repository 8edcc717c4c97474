"""Training data: a file of JSON lines, each a conversation, a prompt with its completion, or a text.

Forms, told apart by their keys: {"messages": [{"role", "content"}]} (OpenAI), {"conversations": [{"from", "value"}]}
(ShareGPT), {"prompt", "completion"}, {"text"}.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from twofold.api.errors import ConfigError, RequestError
from twofold.api.regular_file import open_regular
from twofold.training.finetune.answers import AnswerTokens, Example

_ROLES: Final = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""ShareGPT's speakers."""
_FORMS: Final = "messages, conversations, prompt and completion, or text"
_MAX_LINE_BYTES: Final = 64 << 20
_MAX_QUOTED: Final = 40


@dataclass(frozen=True)
class TrainingData:
    """The examples of a file, and its SHA-256."""

    examples: tuple[Example, ...]
    sha256: str
    num_truncated: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.examples))


class BadLinesError(ConfigError):
    """Lines of a data file that cannot be used; `lines` has one message for each."""

    def __init__(self, path: Path, lines: list[str]) -> None:
        self.lines = lines
        super().__init__(f"{path}: {len(lines)} lines cannot be used; nothing was written")


def read_data(path: Path, tokens: AnswerTokens, *, max_length: int, truncates: bool) -> TrainingData:
    """Read a data file.

    Args:
        max_length: most tokens of an example.
        truncates: cut longer ones instead of refusing them.

    Raises:
        BadLinesError: some lines cannot be used, or there are none.
        ConfigError: the file cannot be read.
    """
    examples: list[Example] = []
    bad: list[str] = []
    num_truncated = 0
    digest = hashlib.sha256()
    for number, line in _lines(path):
        digest.update(line)
        if not line.strip():
            continue
        try:
            for example in _examples(line, tokens):
                kept = example.truncated(max_length)
                if len(example) > max_length and not truncates:
                    raise RequestError(
                        f"{len(example)} tokens, expected at most {max_length}; raise --max-length, or cut them with "
                        "--truncate"
                    )
                # The first token is predicted from nothing.
                if not any(kept.is_answer[1:]):
                    raise RequestError(f"no answer begins within its first {max_length} tokens")
                num_truncated += len(kept) < len(example)
                examples.append(kept)
        except RequestError as error:
            bad.append(f"{path}:{number}: {error}")
    if not bad and not examples:
        bad.append(f"{path}: holds no examples, expected one JSON object a line with {_FORMS}")
    if bad:
        raise BadLinesError(path, bad)
    return TrainingData(tuple(examples), digest.hexdigest(), num_truncated)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers. A line beyond the limit is cut, so that it is no JSON."""
    try:
        with open_regular(path) as stream:
            number = 0
            while line := stream.readline(_MAX_LINE_BYTES):
                number += 1
                yield number, line
    except OSError as error:
        raise ConfigError(f"--data {path}: cannot be read: {error.strerror}") from None


def _examples(line: bytes, tokens: AnswerTokens) -> list[Example]:
    """Raises RequestError for a line that cannot be used."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise RequestError(f"is {_named(row)}, expected an object with {_FORMS}")
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RequestError(f"tools is {_named(tools)}, expected a list of objects")
    if "messages" in row:
        return tokens.of_conversation(_turns(row["messages"], "messages"), tools)
    if "conversations" in row:
        return tokens.of_conversation(_sharegpt(row), tools)
    if "prompt" in row and "completion" in row:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            first = _turns(prompt, "prompt", needs_answer=False)
            skipped = sum(turn["role"] == "assistant" for turn in first)
            return tokens.of_conversation([*first, *_turns(completion, "completion")], tools, skipped)
        return [tokens.of_text(_text(prompt, "prompt"), _filled(completion, "completion"))]
    if "text" in row:
        return [tokens.of_text(_filled(row["text"], "text"))]
    raise RequestError(f"has the keys {', '.join(sorted(row))[:200] or '(none)'}, expected {_FORMS}")


def _turns(given: Any, key: str, *, needs_answer: bool = True) -> list[dict[str, Any]]:
    """Messages in OpenAI's form, checked; content in parts is joined."""
    if not isinstance(given, list) or not given:
        raise RequestError(f"{key} is {_named(given)}, expected a list of messages")
    turns = []
    for number, turn in enumerate(given):
        where = f"{key}[{number}]"
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise RequestError(f"{where} is not an object with role and content")
        content = turn.get("content")
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            content = "".join(
                part if isinstance(part, str) else _text(part, f"{where}'s part") for part in parts
            )
        if content is None and turn.get("tool_calls"):
            content = ""
        content = _text(content, f"{where}.content")
        if turn["role"] == "assistant" and not content.strip() and not turn.get("tool_calls"):
            raise RequestError(f"{where} is an empty answer")
        turns.append({**turn, "content": content})
    if needs_answer and turns[-1]["role"] != "assistant":
        if all(turn["role"] != "assistant" for turn in turns):
            raise RequestError(f"{key} has no message of the role assistant, so there is no answer to learn")
        turns = turns[: 1 + max(at for at, turn in enumerate(turns) if turn["role"] == "assistant")]
    return turns


def _sharegpt(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = row["conversations"]
    turns = []
    if isinstance(row.get("system"), str) and row["system"]:
        turns.append({"role": "system", "content": row["system"]})
    for number, turn in enumerate(given if isinstance(given, list) else []):
        where = f"conversations[{number}]"
        if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
            raise RequestError(f"{where} is not an object with from and value")
        role = _ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
        if role is None:
            raise RequestError(f"{where}.from is {_named(turn['from'])}, expected one of {', '.join(_ROLES)}")
        turns.append({"role": role, "content": turn["value"]})
    return _turns(turns if isinstance(given, list) else given, "conversations")


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{key} is {_named(value)}, expected text")
    return value


def _filled(value: Any, key: str) -> str:
    if not _text(value, key).strip():
        raise RequestError(f"{key} is empty")
    return str(value)


def _named(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= _MAX_QUOTED else f"{shown[:_MAX_QUOTED]}..."
