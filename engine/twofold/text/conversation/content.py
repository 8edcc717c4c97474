"""Message content of every API → text and pictures. Other parts become a placeholder that names them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from twofold.text.conversation.pictures import picture_of

_TEXT_KEYS: Final = ("text", "refusal", "thinking", "content", "output")
"""Members of a part that hold its text, or further parts."""
THINKING: Final = frozenset(("thinking", "reasoning", "reasoning_text"))
_IGNORED: Final = frozenset(("redacted_thinking", "reasoning.encrypted", "cache_point"))
"""Parts that only another server can read and that tell the model nothing."""
_KINDS: Final = {
    "image": "image", "picture": "image", "audio": "audio", "video": "video", "document": "document", "file": "file",
}  # fmt: skip
"""A word in a part's type → its name in the placeholder."""
_NAMES: Final = ("filename", "file_name", "name", "title", "tool_name")
_WHY: Final = ": this model reads text only]"
_PLACEHOLDER: Final = re.compile(r"\[[^\[\]\n]{1,128}" + re.escape(_WHY))
_MAX_DEPTH: Final = 8


def placeholder(kind: str, name: str = "") -> str:
    """The text in place of content that the model cannot read, e.g. "[image a.png: this model reads text only]"."""
    shown = re.sub(r"[\[\]\s]+", " ", f"{kind} {name}").strip()[:80]
    return f"[{shown}{_WHY}"


def has_placeholder(text: str) -> bool:
    return _WHY in text


def is_unreadable(text: str) -> bool:
    """Whether the content has placeholders and nothing else."""
    return has_placeholder(text) and not _PLACEHOLDER.sub("", text).strip()


def readable(content: Any, between: str = "") -> Any:
    """Content as text: null is empty, parts are joined by `between`. A value of another type is returned unchanged."""
    found = with_pictures(content, between)
    if isinstance(found, list):
        return "".join(
            part if isinstance(part, str) else placeholder("image", part["name"]) for part in found
        )
    return found


def with_pictures(content: Any, between: str = "") -> Any:
    """The same as `readable` for content without pictures; else its texts and its pictures in the form of
    `pictures.picture_of`, in order."""
    if content is None:
        return ""
    if not isinstance(content, (list, Mapping)):
        return content
    parts = list(_texts(content, 0))
    if all(isinstance(part, str) for part in parts):
        return between.join(parts)
    return [each for part in parts for each in (between, part)][1:]


def joined_content(first: Any, between: str, second: Any) -> Any:
    """Two results of `with_pictures` as one; `between` stands where a text follows a text."""
    one, other = ([each] if isinstance(each, str) else each for each in (first, second))
    if isinstance(one[-1], str) and isinstance(other[0], str):
        parts = [*one[:-1], one[-1] + between + other[0], *other[1:]]
    else:
        parts = [*one, *other]
    return parts[0] if len(parts) == 1 else parts


def separate(content: Any, kinds: Collection[str]) -> tuple[Any, list[Mapping[str, Any]]]:
    """Content without its parts of these types, and these parts."""
    if not isinstance(content, list):
        return content, []
    rest: list[Any] = []
    taken: list[Mapping[str, Any]] = []
    for part in content:
        is_taken = isinstance(part, Mapping) and part.get("type") in kinds
        (taken if is_taken else rest).append(part)
    return rest, taken


def _texts(content: Any, depth: int) -> Iterator[Any]:
    """Texts and pictures of a part or a list of parts, in their order."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list) and depth < _MAX_DEPTH:
        for part in content:
            yield from _texts(part, depth + 1)
    elif isinstance(content, Mapping):
        yield from _part(content, depth)


def _part(part: Mapping[str, Any], depth: int) -> Iterator[Any]:
    kind = part.get("type")
    picture = picture_of(part)
    if picture is not None:
        yield picture | {"name": _name(part, str(kind))}
        return
    if not isinstance(kind, str):
        # Either a part that names no type, or a tool's result as an object.
        yield part["text"] if isinstance(part.get("text"), str) else json.dumps(part, ensure_ascii=False)
        return
    if kind in _IGNORED:
        return
    named = next((name for word, name in _KINDS.items() if word in kind), None)
    if named is None:
        for key in _TEXT_KEYS:
            if isinstance(part.get(key), (str, list)):
                yield from _texts(part[key], depth)
                return
        if kind == "text" or kind.endswith("_text"):
            return
    source = part.get("source")
    if isinstance(source, Mapping) and source.get("type") in ("text", "content"):
        yield from _texts(source.get("data") or source.get("content"), depth)
        return
    yield placeholder(named or kind, _name(part, kind))


def _name(part: Mapping[str, Any], kind: str) -> str:
    for held in (part, part.get(kind)):
        if isinstance(held, Mapping):
            found = next((held[key] for key in _NAMES if isinstance(held.get(key), str)), "")
            if found:
                return str(found)
    return ""
