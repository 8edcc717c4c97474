"""Conversations with pictures as prompts of an engine of this process."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from twofold.api.errors import ConfigError
from twofold.api.media import PromptMedia
from twofold.api.picture_config import MAX_PICTURE_BYTES
from twofold.api.regular_file import read_regular
from twofold.text.conversation.arranging import rendered
from twofold.text.conversation.content import with_pictures
from twofold.vision.encoded import SentPicture
from twofold.vision.prompt_pictures import PromptPictures, why_text_alone

if TYPE_CHECKING:
    from twofold.engine import Engine


class RenderedPrompt(NamedTuple):
    """A conversation as the engine takes it."""

    token_ids: Sequence[int]
    text: str
    media: PromptMedia | None


def picture_part(path: Path) -> dict[str, Any]:
    """A picture file as a part of a message, as OpenAI's API has it. Raises ConfigError if it cannot be read."""
    try:
        data, size = read_regular(path, MAX_PICTURE_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if size > MAX_PICTURE_BYTES:
        raise ConfigError(
            f"{path} has {size:,} bytes; at most {MAX_PICTURE_BYTES:,} were expected of a picture"
        )
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return {
        "type": "image_url",
        "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"},
    }


def rendered_prompt(engine: Engine, turns: Sequence[Mapping[str, Any]]) -> RenderedPrompt:
    """The conversation by the model's chat template; contents are texts or lists of parts.

    Raises:
        ConfigError: there is a picture, and the model reads text only.
        RequestError: the template refuses the conversation, or a picture is damaged.
    """
    tokenizer = engine.tokenizer
    pictures = None if engine.pictures is None else PromptPictures(engine.pictures)
    sent: list[SentPicture] = []

    def text_of(content: Any) -> str:
        parts = with_pictures(content)
        if isinstance(parts, str):
            return parts
        if pictures is None:
            raise ConfigError(f"{engine.info.model} {why_text_alone(engine.config)}")
        pieces = []
        for part in parts:
            if isinstance(part, str):
                pieces.append(part)
                continue
            data = base64.b64decode(part["url"].partition(",")[2])
            pieces.append(pictures.stand_in(len(sent)))
            sent.append(SentPicture(data, f"picture {len(sent) + 1}"))
        return "".join(pieces)

    written = [{**turn, "content": text_of(turn["content"])} for turn in turns]
    replaced: Mapping[str, str] = {}
    if pictures is not None and sent:
        pictures.encode(sent)
        replaced = pictures.written(tokenizer)
    _, text = rendered(
        written, tokenizer, lambda turns: tokenizer.apply_chat_template(turns, replaced=replaced)
    )
    token_ids: Sequence[int] = tokenizer.encode(text)
    if pictures is None or not sent:
        return RenderedPrompt(token_ids, text, None)
    placed = pictures.placed(token_ids)
    return RenderedPrompt(placed.token_ids, text, placed.media)
