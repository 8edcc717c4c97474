"""Threads that prepare requests, so that nothing long runs on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from twofold.server.bridge.models.prompt_tokens import TooManyTokensError
from twofold.server.http.errors import CONTEXT_LENGTH, ApiError, too_long

T = TypeVar("T")


class Threads:
    """One pool per kind of work."""

    def __init__(self) -> None:
        # Two, so that a long prompt does not delay a short one. Tokenising releases the GIL.
        self.tokenisers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenise")
        # One, only for prompts that are refused: they delay no other request.
        self.counters = ThreadPoolExecutor(max_workers=1, thread_name_prefix="count")
        # One, because the worker parses one body at a time; only large bodies wait here.
        self.parsers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parse")
        # Several, so that a compiled grammar does not wait for a new one.
        self.compilers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="compile")

        # Pictures come from other servers, or are decoded from base64.
        self.fetchers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="fetch")
        # One, because the encoder takes one picture at a time.
        self.encoders = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")

    async def tokenise(self, work: Callable[[], T], *, param: str) -> T:
        """Run `work` on a tokeniser thread and return its result. ApiError 400 with the length for a text that is too
        long; `param` is its field.

        The length is counted on a thread of its own, so that requests that fit do not wait for it.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.tokenisers, work)
        except TooManyTokensError as error:
            count = await loop.run_in_executor(self.counters, error.count)
            message = too_long(count, error.max_context, error.limit_reason)
            raise ApiError(400, message, param=param, code=CONTEXT_LENGTH) from None

    def close(self) -> None:
        for pool in (
            self.tokenisers,
            self.counters,
            self.parsers,
            self.compilers,
            self.fetchers,
            self.encoders,
        ):
            pool.shutdown(wait=False, cancel_futures=True)
