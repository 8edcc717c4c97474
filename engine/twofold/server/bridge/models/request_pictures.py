"""Pictures of one request: fetched and encoded before its prompt is tokenised, placed in it after."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from twofold.api.errors import RequestError
from twofold.server.bridge.models.protocol import Prompt
from twofold.server.bridge.models.threads import Threads
from twofold.server.http.picture_sources import PictureSources
from twofold.vision.encoded import SentPicture
from twofold.vision.prompt_pictures import PromptPictures


@dataclass(frozen=True)
class NamedPicture:
    """A picture as a request sends it."""

    url: str
    """A URL, or the file in base64."""
    where: str
    """The field that holds it, for errors."""
    low_detail: bool


@dataclass(frozen=True)
class RequestPictures:
    """Pictures of one request, in the order of its messages."""

    of_prompt: PromptPictures
    sources: PictureSources
    named: Sequence[NamedPicture]

    async def encode(self, threads: Threads) -> None:
        """Fetch and encode all. Raises RequestError, ConfigError, ModelLoadError or KernelError."""
        loop = asyncio.get_running_loop()
        read = self.sources.read
        files = await asyncio.gather(
            *(loop.run_in_executor(threads.fetchers, read, each.url, each.where) for each in self.named)
        )
        sent = [
            SentPicture(data, each.where, each.low_detail)
            for data, each in zip(files, self.named, strict=True)
        ]
        await loop.run_in_executor(threads.encoders, self.of_prompt.encode, sent)

    async def placed(
        self, prompts: Sequence[Prompt], threads: Threads, max_tokens: int | None = None
    ) -> list[Prompt]:
        """The prompts with the pictures' rows.

        max_tokens: length to which the request would have them truncated.

        Raises:
            RequestError: the chat template left out a picture, or a prompt would be truncated.
        """
        loop = asyncio.get_running_loop()
        return [
            await loop.run_in_executor(threads.encoders, self._placed, prompt, max_tokens)
            for prompt in prompts
        ]

    def _placed(self, prompt: Prompt, max_tokens: int | None) -> Prompt:
        try:
            placed = self.of_prompt.placed(prompt.token_ids)
        except ValueError as error:
            raise RequestError(
                f"messages: this model's chat template leaves out pictures in this place ({error}); send them in a "
                "user's message",
                param="messages",
            ) from None
        if max_tokens is not None and len(placed.token_ids) > max_tokens:
            raise RequestError(
                f"the prompt has {len(placed.token_ids)} tokens with its pictures and would be truncated to "
                f"{max_tokens}; prompts with pictures cannot be, send fewer messages",
                param="messages",
            )
        ends = tuple(int(placed.offsets[end]) for end in prompt.turn_ends)
        return replace(prompt, token_ids=placed.token_ids, media=placed.media, turn_ends=ends)
