"""Pictures in message content: the parts of every API that hold one, and what stands for one in a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from twofold.api.errors import RequestError

_KINDS: Final = ("image", "picture")
_IN_MEMBERS: Final = ("image_url", "image", "source", "url", "data", "base64", "file", "file_data")
"""Members of a part that hold a picture, or an object with these members."""
_TYPES: Final = ("media_type", "mime_type", "mimeType", "mediaType")
_MAX_DEPTH: Final = 3
_BEFORE, _AFTER = "picture-begin", "picture-end"


class PictureTemplate(Protocol):
    """A model's chat template."""

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str: ...


def picture_of(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """The picture that a part of a message holds, as a part of type "image" with `url` (a URL or base64), `name` and
    `detail`; None: it holds none, or one on another server."""
    url = _url(part, 0)
    if url is None or not (
        _is_named_picture(part) or _has_picture_type(part) or url.startswith("data:image/")
    ):
        return None
    nested = part.get("image_url")
    detail = part.get("detail") or (nested.get("detail") if isinstance(nested, Mapping) else None)
    return {"type": "image", "url": url, "name": "", "detail": detail if isinstance(detail, str) else None}


def picture_text(template: PictureTemplate, mark: str) -> str:
    """What the model's chat template writes for a picture, with `mark`; `mark` alone if it writes none."""
    for part in ({"type": "image"}, {"type": "image_url", "image_url": {"url": ""}}):
        content = [{"type": "text", "text": _BEFORE}, part, {"type": "text", "text": _AFTER}]
        try:
            written = template.apply_chat_template([{"role": "user", "content": content}])
        except RequestError:
            continue
        found = written.partition(_BEFORE)[2].partition(_AFTER)[0]
        if mark in found:
            return str(found)
    return mark


def _is_named_picture(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    if not isinstance(kind, str):
        return "image_url" in part
    return any(word in kind for word in _KINDS)


def _has_picture_type(part: Mapping[str, Any]) -> bool:
    """Whether a part of another type, such as a file, says that it is a picture."""
    held = [part, *(part[name] for name in _IN_MEMBERS if isinstance(part.get(name), Mapping))]
    return any(str(each.get(name, "")).startswith("image/") for each in held for name in _TYPES)


def _url(held: Mapping[str, Any], depth: int) -> str | None:
    for name in _IN_MEMBERS:
        value = held.get(name)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            found = _url(value, depth + 1)
            if found is not None:
                return found
    return None
