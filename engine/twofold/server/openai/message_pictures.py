"""Pictures of a conversation, for a model that reads them; other models get placeholders in earlier turns."""

from __future__ import annotations

from collections.abc import Sequence

from twofold.api.errors import RequestError
from twofold.api.picture_config import parse_picture_limit
from twofold.server.bridge.models.request_pictures import NamedPicture, RequestPictures
from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.openai.messages import Message, newest
from twofold.vision.prompt_pictures import PromptPictures, why_text_alone


def request_pictures(messages: Sequence[Message], model: ServedModel) -> RequestPictures | None:
    """The conversation's pictures; None: it has none, or the model reads text only. RequestError for more pictures than
    --limit-mm-per-prompt, and for one in a new message of the user to a model that reads text only."""
    named = [
        NamedPicture(picture.url, f"messages[{number}].content", picture.detail == "low")
        for number, message in enumerate(messages)
        for picture in message.pictures or ()
    ]
    if not named:
        return None
    engine = model.engine
    if engine.pictures is None:
        asked = newest(messages)
        # Beside a tool's result the picture is an agent's, which cannot send another one.
        is_question = all(messages[number].role == "user" for number in asked)
        for number in asked:
            if is_question and messages[number].pictures:
                where = f"messages[{number}].content"
                raise RequestError(
                    f"{where}: holds a picture, and {model.name!r} {why_text_alone(engine.config)}: this model reads "
                    "text only. Send text, or ask a model that reads pictures",
                    param=where,
                )
        return None
    limit = parse_picture_limit(engine.config.limit_mm_per_prompt)
    if len(named) > limit:
        raise RequestError(
            f"{named[limit].where}: the conversation has {len(named)} pictures; at most {limit} are taken "
            "(--limit-mm-per-prompt)",
            param=named[limit].where,
        )
    return RequestPictures(PromptPictures(engine.pictures), model.server.picture_sources, named)
