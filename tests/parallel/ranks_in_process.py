"""Ranks without processes: jobs of rank 0 are answered at once, by shares that this process loaded."""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path

import numpy as np
import numpy.typing as npt
from twofold import _core
from twofold.api.config import EngineConfig
from twofold.api.media import PromptMedia
from twofold.api.parallel_config import ParallelConfig
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.experts.spread import RankShare
from twofold.models import open_model_files
from twofold.models.registry import read_config
from twofold.parallel.worker import Worker

PROMPT = (3, 7, 12, 5, 40, 41, 9, 3, 7, 12, 5)


class RanksInProcess:
    """Rank 0's share, and the other ranks' workers."""

    def __init__(self, config: EngineConfig, parallel: ParallelConfig) -> None:
        size = parallel.tensor_parallel_size
        self._answers: defaultdict[int, deque[npt.NDArray[np.float32]]] = defaultdict(deque)
        self.num_jobs = [0] * size
        self.share = RankShare(_core.Ranks(0, size, send_job=self._send_job, receive=self._receive), parallel)
        files = open_model_files(Path(config.model), config.speculation.mtp_use)
        self.workers = {
            rank: Worker(
                config,
                files,
                RankShare(_core.Ranks(rank, size, send_job=self._send_job, receive=self._receive), parallel),
            )
            for rank in range(1, size)
        }

    def _send_job(self, to: int, job: memoryview, rows: memoryview) -> None:
        self.num_jobs[to] += 1
        answer = self.workers[to].answer(
            np.frombuffer(bytes(job), np.int32), np.frombuffer(bytes(rows), np.float32)
        )
        self._answers[to].append(answer)

    def _receive(self, rank: int, into: memoryview) -> None:
        np.frombuffer(into, np.float32)[:] = self._answers[rank].popleft()


def answered(
    config: EngineConfig, share: RankShare | None, num_tokens: int = 8
) -> tuple[list[int], list[float]]:
    """Tokens of a greedy answer to PROMPT, and the log probability of each. Where the model has experts of pictures,
    some of the prompt's tokens have these."""
    media = PromptMedia((), routed=((2, 7),)) if read_config(config.model).routed.second_half else None
    engine = Engine.load(config, share=share)
    tokens: list[int] = []
    chances: list[float] = []

    def take(chunk: Chunk) -> None:
        tokens.extend(chunk.token_ids)
        chances.extend(each.logprob for each in chunk.logprobs or ())

    try:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
        engine.submit(GenerationRequest(PROMPT, sampling, take, "", media=media))
        while engine.step():
            pass
    finally:
        engine.close()
    return tokens, chances
