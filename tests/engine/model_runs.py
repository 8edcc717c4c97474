"""Running a loaded model in tests: paged KV cache, chunked prefill, greedy decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from twofold._testing import kernels
from twofold.blocks import ops
from twofold.blocks.ngram_hash import ngram_ids
from twofold.experts.accelerator import AcceleratorChoice
from twofold.experts.moe import MoeRuntime
from twofold.experts.slot_plan import DenseCost, SlotPlan
from twofold.models import open_model_files
from twofold.step.expert_loading import moe_shape
from twofold.step.model import BatchMeta, LoadedModel

from tests.kernels.kernel_levels import chosen

F32 = npt.NDArray[np.float32]
PAGE_SIZE = 4
MAX_PAGES = 64
NUM_RECORDS = 16


@dataclass
class PagedSequence:
    """One sequence's place in the cache."""

    pages: npt.NDArray[np.int32]
    prompt_length: int
    record: int
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass
class Runner:
    """A model, a cache with pages handed out in shuffled order, and its experts on the CPU."""

    model: LoadedModel
    num_sequences: int = 1
    num_deferred: int = 0
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.config
        num_pages = MAX_PAGES * self.num_sequences
        planes, records = config.cache_planes("float32"), config.record_bytes
        self.cache = ops.StateCache(planes, num_pages, PAGE_SIZE, records, NUM_RECORDS)
        pool = ops.ThreadPool(1)
        files = self.model.files
        choice = AcceleratorChoice("none", "asked for")
        slots, cost = SlotPlan(0, "lru", num_deferred=self.num_deferred), DenseCost([], [])
        self.moe = MoeRuntime(moe_shape(files), files.expert_layers(), pool, choice, slots, cost)
        self._steps = 0
        self._num_sequences = 0
        self._free = np.random.default_rng(7).permutation(num_pages).tolist()

    def sequence(self, prompt_length: int) -> PagedSequence:
        pages = [self._free.pop() for _ in range(MAX_PAGES)]
        self._num_sequences += 1
        return PagedSequence(np.array(pages, np.int32), prompt_length, self._num_sequences % NUM_RECORDS)

    def step(self, *parts: tuple[PagedSequence, Sequence[int]]) -> list[F32]:
        """One forward pass over the next tokens of some sequences; each one's hidden states."""
        tokens = np.concatenate([np.asarray(ids, np.int32) for _, ids in parts])
        positions = [np.arange(seq.length, seq.length + len(ids), dtype=np.int32) for seq, ids in parts]
        batch = BatchMeta(
            positions=np.concatenate(positions),
            sequence_index=np.repeat(np.arange(len(parts), dtype=np.int32), [len(ids) for _, ids in parts]),
            page_tables=np.stack([seq.pages for seq, _ in parts]),
            prompt_lengths=np.array([seq.prompt_length for seq, _ in parts], np.int32),
            records=np.array([seq.record for seq, _ in parts], np.int32),
            ids=np.concatenate(
                [ngram_ids([*seq.tokens, *ids], seq.length, max(1, self.model.num_ids)) for seq, ids in parts]
            ),
        )
        generated = [
            bool(at >= seq.prompt_length)
            for (seq, _), own in zip(parts, positions, strict=True)
            for at in own
        ]
        self.moe.begin_step(self._steps, [0] * len(tokens), [0] * len(tokens), generated)
        self._steps += 1
        hidden = self.model.forward(tokens, batch, self.cache, self.moe.executor)
        for seq, ids in parts:
            seq.tokens += ids
        return np.split(hidden, np.cumsum([len(ids) for _, ids in parts])[:-1])

    def logits(self, hidden: F32) -> F32:
        return self.model.logits(np.ascontiguousarray(hidden)).copy()

    def prefill(self, ids: Sequence[int], chunks: Sequence[int] = ()) -> tuple[PagedSequence, F32]:
        """Prefill in chunks of the given sizes (the last takes the rest); the hidden states of all tokens."""
        seq = self.sequence(len(ids))
        hidden = [self.step((seq, part))[0] for part in split(ids, chunks)]
        return seq, np.concatenate(hidden)

    def greedy(self, ids: Sequence[int], num_tokens: int) -> tuple[list[int], float]:
        """Greedy answer, and the smallest lead that a chosen token had over the second best."""
        seq, hidden = self.prefill(ids)
        logits = self.logits(hidden[-1:])[0]
        answer: list[int] = []
        lead = np.inf
        while True:
            second, best = np.sort(logits)[-2:]
            lead = min(lead, float(best - second))
            answer.append(int(logits.argmax()))
            if len(answer) == num_tokens:
                return answer, lead
            logits = self.logits(self.step((seq, answer[-1:]))[0])[0]


def rounds_activations(format_name: str) -> bool:
    """Whether products with weights of this format round activations to bfloat16, on the kernels chosen here."""
    kind, _ = kernels.format_kernel(chosen(format_name), format_name)
    return kind == "bf16"


def load(directory: Path, num_sequences: int = 2, num_threads: int = 2, num_deferred: int = 0) -> Runner:
    return Runner(
        LoadedModel(open_model_files(directory), ops.ThreadPool(num_threads)), num_sequences, num_deferred
    )


def split(ids: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    begin = 0
    for size in sizes:
        yield ids[begin : begin + size]
        begin += size
    if begin < len(ids):
        yield ids[begin:]


def random_prompt(length: int, seed: int = 11) -> list[int]:
    """Ids of the tiny models' vocabulary, special tokens left out."""
    return np.random.default_rng(seed).integers(3, 320, length).tolist()
