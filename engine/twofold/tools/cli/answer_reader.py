"""Reads one answer of a started engine on the main thread, where Ctrl-C arrives."""

from __future__ import annotations

import queue
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from twofold.api.errors import CapacityError, KernelError
from twofold.api.media import PromptMedia
from twofold.api.types import Chunk, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from twofold.engine import Engine


def read_answer(
    engine: Engine,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    endpoint: str,
    shown_tokens: frozenset[int] = frozenset(),
    media: PromptMedia | None = None,
) -> Iterator[Chunk]:
    """The answer's chunks as they are computed. shown_tokens: special tokens that are part of the text.

    Closing the iterator early, or Ctrl-C while it waits, cancels the request and waits until it has ended.

    Raises:
        RequestError: the prompt does not fit or is empty.
        KernelError: the engine failed during the answer.
    """
    chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
    request_id = f"{endpoint}-{uuid.uuid4().hex}"
    scales = engine.adapters.scales
    adapter = engine.adapters.hold(scales) if scales else None
    engine.submit(
        GenerationRequest(
            tuple(prompt),
            sampling,
            chunks.put,
            request_id,
            endpoint=endpoint,
            adapter=adapter,
            shown_tokens=shown_tokens,
            media=media,
        )
    )
    if adapter is not None:
        engine.adapters.release(adapter)
    finished = False
    try:
        while not finished:
            chunk = chunks.get()
            finished = chunk.finish_reason is not None
            if chunk.finish_reason == "error":
                raise KernelError(chunk.error or "the engine failed while it computed the answer")
            if chunk.finish_reason == "cancelled":
                raise CapacityError("the engine cancelled the answer")
            yield chunk
    finally:
        if not finished:
            engine.cancel(request_id)
            while chunks.get().finish_reason is None:
                pass
