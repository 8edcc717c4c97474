"""Teacher forcing: decodes a given text through the serving operators, to measure settings that only affect decode
tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from twofold import _core
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.blocks import ops
from twofold.blocks.ngram_hash import ngram_ids
from twofold.experts.accelerator import AcceleratorChoice
from twofold.experts.moe import MoeRuntime
from twofold.experts.profiles import CpuCurve, MachineProfile, load_profile
from twofold.experts.slot_plan import DenseCost, SlotPlan
from twofold.models.bundled import bundled_model_path
from twofold.models.model_files import ModelFiles, open_model_files
from twofold.models.sizing import dense_stretches
from twofold.quantise.quality import Quality, quality_of
from twofold.quantise.texts import read_text, token_sequences
from twofold.step.expert_loading import moe_shape
from twofold.step.model import BatchMeta, LoadedModel

F32 = npt.NDArray[np.float32]
_PAGE_SIZE: Final = 16
_ON_CPU: Final = AcceleratorChoice("none", "asked for")


@dataclass(frozen=True)
class Reading:
    """Result of one reading of all sequences."""

    logits: list[F32]
    """[tokens, vocabulary] of each sequence."""
    hits: int
    routed: int
    """Routed experts, including hits."""
    tokens_per_s: float
    """By the virtual clock; 0 without one."""
    events: npt.NDArray[np.void] | None
    """The executor's events [tokens, layers], if each token was a step of its own."""

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.routed)


class DecodedText:
    """A model and the sequences it reads. One reading at a time."""

    def __init__(self, files: ModelFiles, sequences: Sequence[Sequence[int]], pool: ops.ThreadPool) -> None:
        self.files, self.sequences, self.pool = files, sequences, pool
        self.shape = moe_shape(files)
        self.dense_cost = DenseCost(*dense_stretches(files))
        self._model = LoadedModel(files, pool)
        self._store: _core.ExpertStore | None = None
        self._longest = max(map(len, sequences))

    @property
    def store(self) -> _core.ExpertStore:
        """The store of the model's experts; available after the first reading."""
        assert self._store is not None
        return self._store

    def cpu_curve(self, profile: MachineProfile) -> CpuCurve | None:
        shape = self.shape
        return profile.cpu_curve(shape.format, shape.hidden, shape.intermediate, self.pool.num_threads)

    def at_once(self, num_deferred: int = 0) -> Reading:
        """All experts on the CPU and a sequence's tokens in one step; each token's result is as if computed alone."""
        moe = self._runtime(_ON_CPU, SlotPlan(0, "", num_deferred=num_deferred))
        logits = [self._step(moe, number, tokens, 0) for number, tokens in enumerate(self.sequences)]
        return Reading(logits, 0, 0, 0.0, None)

    def token_by_token(self, profile: MachineProfile, slots: SlotPlan) -> Reading:
        """On an emulated machine from a cold start, one token per step."""
        moe = self._runtime(AcceleratorChoice("emulated", "asked for", profile), slots)
        moe.executor.events_enabled = True
        logits: list[F32] = []
        routed: list[npt.NDArray[np.void]] = []
        for number, tokens in enumerate(self.sequences):
            rows = []
            for at, token in enumerate(tokens):
                rows.append(self._step(moe, number, [token], at))
                routed.append(moe.drain_events()["token_layer"])
            logits.append(np.concatenate(rows))
        counts, now_us = moe.counts(), moe.virtual_now_us
        assert now_us is not None
        events = np.concatenate(routed).reshape(-1, self.shape.num_layers)
        all_routed = counts.hits + counts.cpu_misses + counts.fetched
        return Reading(logits, counts.hits, all_routed, len(events) / now_us * 1e6, events)

    def trace(self, events: npt.NDArray[np.void]) -> _core.RoutingTrace:
        """The routing of a reading as a trace."""
        top_k = self.shape.top_k
        return _core.RoutingTrace(
            np.ascontiguousarray(events["experts"][..., :top_k], np.uint16),
            np.ascontiguousarray(events["weights"][..., :top_k], np.float32),
            np.cumsum([0, *map(len, self.sequences)]).astype(np.int64),
            self.shape.num_experts,
        )

    def quality(self, source: Reading, other: Reading) -> Quality:
        def compared() -> Iterator[tuple[npt.NDArray[np.int64], F32, F32]]:
            for tokens, source_rows, other_rows in zip(
                self.sequences, source.logits, other.logits, strict=True
            ):
                yield np.array([*tokens[1:], -1], np.int64), source_rows, other_rows

        return quality_of(compared())

    def _runtime(self, choice: AcceleratorChoice, slots: SlotPlan) -> MoeRuntime:
        moe = MoeRuntime(
            self.shape,
            self._store or self.files.expert_layers(),
            self.pool,
            choice,
            slots,
            self.dense_cost,
        )
        self._store = moe.store
        config = self.files.config
        planes = config.cache_planes("float32")
        pages = -(-self._longest // _PAGE_SIZE)
        self._cache = ops.StateCache(planes, pages, _PAGE_SIZE, config.record_bytes, 1)
        self._pages = np.arange(pages, dtype=np.int32)[None]
        return moe

    def _step(self, moe: MoeRuntime, number: int, tokens: Sequence[int], begin: int) -> F32:
        """Logits of tokens of a sequence, starting at position `begin`."""
        count = len(tokens)
        positions = np.arange(begin, begin + count, dtype=np.int32)
        batch = BatchMeta(
            positions=positions,
            sequence_index=np.zeros(count, np.int32),
            page_tables=self._pages,
            prompt_lengths=np.array([len(self.sequences[number])], np.int32),
            records=np.zeros(1, np.int32),
            ids=ngram_ids(self.sequences[number][: begin + count], begin, max(1, self._model.num_ids)),
        )
        moe.begin_step(begin, [number] * count, positions.tolist(), [True] * count)
        hidden = self._model.forward(np.array(tokens, np.int32), batch, self._cache, moe.executor)
        moe.executor.end_step()
        return self._model.logits(hidden).copy()


def quality_columns(quality: Quality) -> str:
    """KL mean, 99 %, same token and perplexity, in the format of the lab's tables."""
    return (
        f"{quality.mean_kl:>9.5f} {quality.p99_kl:>8.4f} {100 * quality.same_top:>10.1f} %   "
        f"{quality.source_perplexity:.3f} → {quality.perplexity:.3f}"
    )


def quality_row(quality: Quality) -> dict[str, object]:
    """The same as JSON."""
    return {name: value for name, value in quality.as_json().items() if name != "drift_by_layer"}


def add_text_arguments(
    parser: argparse.ArgumentParser, *, max_tokens: int = 1024, sequence_tokens: int = 256
) -> None:
    parser.add_argument(
        "model", nargs="?", default="", help="directory or GGUF file (default: the bundled model)"
    )
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text to read (default: a tale in English)")
    for flag, default, what in (
        ("--max-tokens", max_tokens, "tokens of the text"),
        ("--sequence-tokens", sequence_tokens, "tokens read as one sequence, at most the model's context"),
        ("--cpu-threads", 0, "0: one per physical core"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    machine, slots = "machine that is emulated (default: %(default)s)", "share of the experts in its slots"
    parser.add_argument("--profile", default="rtx4090-pcie4", metavar="NAME", help=machine)
    parser.add_argument(
        "--slots", type=float, default=0.25, metavar="R", help=f"{slots} (default: %(default)s)"
    )


def read_text_arguments(args: argparse.Namespace) -> tuple[Path, ModelFiles, list[list[int]], ops.ThreadPool]:
    """The model's path and files, its text and threads. Raises ConfigError, ModelLoadError."""
    for flag, value in (("--max-tokens", args.max_tokens), ("--sequence-tokens", args.sequence_tokens)):
        if value < 2:
            raise ConfigError(f"{flag} was given {value}; it takes 2 or more")
    threads = EngineConfig(cpu_threads=args.cpu_threads).cpu_threads
    path = Path(args.model).expanduser() if args.model else bundled_model_path()
    files = open_model_files(path)
    sequences = token_sequences(path, files, read_text(args.text), args.max_tokens, args.sequence_tokens)
    return path, files, sequences, ops.ThreadPool(threads)


def read_arguments(args: argparse.Namespace) -> tuple[DecodedText, MachineProfile, SlotPlan]:
    """The text, machine and slots. Raises ConfigError, ModelLoadError."""
    policy = EngineConfig(gpu_experts_ratio=args.slots).policy
    _, files, sequences, pool = read_text_arguments(args)
    text = DecodedText(files, sequences, pool)
    num_slots = round(args.slots * text.shape.num_layers * text.shape.num_experts)
    return text, load_profile(args.profile), replace(SlotPlan(num_slots, policy), num_staging=-1)
