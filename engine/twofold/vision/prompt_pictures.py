"""Pictures of one prompt: what stands for them while its chat template is rendered, and where their rows are then."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Protocol

from twofold.api.picture_config import PictureConfig
from twofold.text.conversation.pictures import PictureTemplate, picture_text
from twofold.vision.encoded import EncodedPicture, PlacedPrompt, SentPicture


def why_text_alone(config: PictureConfig) -> str:
    """What a model without `PictureEncoding` lacks."""
    if not config.takes_pictures:
        return f"takes no pictures (--limit-mm-per-prompt {config.limit_mm_per_prompt})"
    return "has no picture encoder (a GGUF model's is the file mmproj-*.gguf beside it)"


class PictureEncoding(Protocol):
    """The part of `vision.service.PictureService` that prompts need; every method blocks."""

    def mark(self) -> str: ...

    def encode(self, sent: Sequence[SentPicture]) -> list[EncodedPicture]: ...

    def placed(self, token_ids: Sequence[int], pictures: Sequence[EncodedPicture]) -> PlacedPrompt: ...


class PromptPictures:
    """Pictures of one prompt, in its order."""

    def __init__(self, service: PictureEncoding) -> None:
        self._service = service
        self._nonce = secrets.token_hex(12)
        self.encoded: list[EncodedPicture] = []

    def stand_in(self, number: int) -> str:
        """Stands for a picture in the messages until the template is rendered. No message can contain it."""
        return f"[{self._nonce}:{number}]"

    def encode(self, sent: Sequence[SentPicture]) -> None:
        """Encode all pictures. Raises as `PictureService.encode`."""
        self.encoded = self._service.encode(sent)

    def written(self, template: PictureTemplate) -> Mapping[str, str]:
        """What stands for each picture in the rendered prompt, by its stand-in."""
        mark = self._service.mark()
        block = picture_text(template, mark)
        return {
            self.stand_in(number): block.replace(mark, picture.text)
            for number, picture in enumerate(self.encoded)
        }

    def placed(self, token_ids: Sequence[int]) -> PlacedPrompt:
        """The prompt with the pictures' rows. Raises as `PictureService.placed`."""
        return self._service.placed(token_ids, self.encoded)
