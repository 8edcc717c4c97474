"""A model, its KV cache and its experts' runtime as one thing that computes a scheduled step.

Builds the flattened batch and returns the logits to sample from. Decides nothing, samples nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from twofold import ops
from twofold.config import EngineConfig
from twofold.experts.accelerator import AcceleratorChoice, num_slots
from twofold.experts.moe import DenseCost, MoeRuntime, MoeShape, SlotPlan
from twofold.experts.profiles import load_machine_profile
from twofold.model import BatchMeta, LoadedModel, LoadProgress, ProgressFn
from twofold.model.sizing import dense_stretches
from twofold.scheduler import ScheduledSequence

F32 = npt.NDArray[np.float32]


class ModelRunner:
    """A model, its KV cache and where its experts run. The engine thread owns it."""

    def __init__(self, model: LoadedModel, moe: MoeRuntime, kv_cache: ops.KvCache) -> None:
        self.model = model
        self.moe = moe
        self._kv_cache = kv_cache

    def forward(self, step: int, scheduled: Seq[ScheduledSequence]) -> F32:
        """Compute the step's tokens. Returns logits [R, vocabulary], one row per sequence that samples, in order."""
        tokens: list[int] = []
        positions: list[int] = []
        sequence_index: list[int] = []
        requests: list[int] = []
        last_rows: list[int] = []
        for index, item in enumerate(scheduled):
            sequence, begin = item.sequence, item.sequence.num_computed
            end = begin + item.num_tokens
            tokens += sequence.token_ids[begin:end]
            positions += range(begin, end)
            sequence_index += [index] * item.num_tokens
            requests += [sequence.number] * item.num_tokens
            if item.samples:
                last_rows.append(len(tokens) - 1)
        batch = BatchMeta(
            positions=np.array(positions, np.int32),
            sequence_index=np.array(sequence_index, np.int32),
            page_tables=_page_tables(scheduled),
            prompt_lengths=np.array([item.sequence.num_prompt_tokens for item in scheduled], np.int32),
        )
        self.moe.begin_step(step, requests, positions)
        hidden = self.model.forward(np.array(tokens, np.int32), batch, self._kv_cache, self.moe.executor)
        logits = self.model.logits(hidden[last_rows])
        self.moe.end_step()
        return logits


def load_experts(
    model: LoadedModel,
    team: ops.ThreadTeam,
    choice: AcceleratorChoice,
    config: EngineConfig,
    progress: ProgressFn | None = None,
) -> MoeRuntime:
    """Pack the model's experts and build what runs them. Raises ConfigError, ModelLoadError."""
    shape = MoeShape(
        num_layers=len(model.moe_layers),
        num_experts=model.config.num_experts,
        top_k=model.config.top_k,
        hidden=model.config.hidden_size,
        intermediate=model.config.moe_intermediate_size,
        formats=model.files.expert_formats(),
    )

    def report(layers_done: int, bytes_done: int, bytes_total: int) -> None:
        if progress is not None:
            layer = f"layer {model.moe_layers[layers_done - 1]}"
            progress(LoadProgress("experts", layer, bytes_done, bytes_total, layers_done, shape.num_layers))

    return MoeRuntime(
        shape,
        model.expert_layers(),
        team,
        choice,
        SlotPlan(num_slots(config, shape.num_layers, shape.num_experts), config.policy, _prefetches(config)),
        DenseCost(*dense_stretches(model.files)),
        report,
        load_machine_profile(config.machine_profile),
    )


def _prefetches(config: EngineConfig) -> bool:
    # Whether an upload pays is asked in misses saved, the unit of payback's values; other policies only rank.
    return config.prefetch == "on" or (config.prefetch == "auto" and config.policy == "payback")


def _page_tables(scheduled: Seq[ScheduledSequence]) -> npt.NDArray[np.int32]:
    """[sequences, most pages]; unused entries are 0 and never read."""
    pages = [item.sequence.pages for item in scheduled]
    if len(pages) == 1:
        return np.array(pages, np.int32)
    tables = np.zeros((len(pages), max(map(len, pages))), np.int32)
    for row, own in zip(tables, pages, strict=True):
        row[: len(own)] = own
    return tables
