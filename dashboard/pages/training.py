"""Training page: how a fine-tuning run learns, how fast, with how much memory, and which experts its tokens take."""

from __future__ import annotations

import numpy as np
import streamlit as st
from twofold.telemetry import queries

from dashboard import formats, frame, parts
from dashboard.figures import experts
from dashboard.figures import training as figures
from dashboard.parts import Shown
from dashboard.view import View


def body(view: View) -> None:
    progress = view.query(queries.training_progress)
    if progress is None:
        parts.note("No step has been recorded yet: the model is being read and measured.")
        return
    steps = view.query(queries.training_steps)
    held_out = steps.eval_loss[~np.isnan(steps.eval_loss)]
    parts.metrics(
        Shown("Step", f"{progress.step:,} of {progress.num_steps:,}"),
        Shown(
            "Time left",
            formats.duration(progress.remaining_s) if view.live else formats.NOTHING,
            "Forward and backward of the remaining steps, at the mean speed so far.",
        ),
        Shown("Loss", f"{progress.loss:.4f}", "Of the latest step, nats per answer token."),
        Shown(
            "Held-out loss, best",
            f"{held_out.min():.4f}" if len(held_out) else formats.NOTHING,
            "Lowest one of the evaluations. The adapter of that step is kept.",
        ),
        Shown("Tokens/s", formats.rate(progress.tokens_per_s), "Of the latest step, without evaluations."),
        Shown("Memory", formats.size(progress.memory_bytes), "Of the process, with mapped files."),
    )
    with parts.card(st, "training-1", "Loss and held-out loss, nats"):
        parts.chart(
            figures.losses(steps),
            key="losses",
            alt="Loss of each step, and held-out loss at evaluations",
            advice="Held-out loss rises while the loss falls: it learns its lines by heart. Stop, or use more data.",
        )
    _pace(steps)
    _load(view)


def _pace(steps: queries.TrainingSteps) -> None:
    left, right = st.columns(2)
    with parts.card(left, "training-2", "Learning rate"):
        parts.chart(
            figures.one(steps.step, steps.learning_rate, name="learning rate", pattern="%{y:.2e}"),
            key="rate",
            alt="Learning rate by step",
            advice="The loss jumps where the rate is highest: lower --learning-rate, or raise --warmup-share.",
        )
    with parts.card(right, "training-3", "Length of the gradient"):
        parts.chart(
            figures.one(steps.step, steps.grad_norm, name="gradient norm", pattern="%{y:.3f}"),
            key="gradient",
            alt="Length of the gradient before clipping, by step",
            advice="Peaks far above --max-grad-norm: look at the data of these steps, or lower --learning-rate.",
        )
    left, right = st.columns(2)
    with parts.card(left, "training-4", "Tokens per second"):
        parts.chart(
            figures.one(steps.step, steps.tokens_per_s, name="tokens/s", pattern="%{y:,.0f} tokens/s"),
            key="speed",
            alt="Tokens per second of each step",
            advice="Falls during the run: another process takes cores, or the processor throttles (Machine).",
        )
    with parts.card(right, "training-5", "Memory, GB"):
        parts.chart(
            figures.one(steps.step, steps.memory_bytes / 1e9, name="memory", pattern="%{y:.2f} GB"),
            key="memory",
            alt="Resident memory of the process by step",
            advice="Near the machine's memory: lower --activation-bytes or --batch-tokens.",
        )


def _load(view: View) -> None:
    if not view.run.num_layers or not parts.has_level(view, "layer"):
        return
    load = view.query(queries.training_load)
    total = load.sum(axis=1, keepdims=True)
    busiest = (load.max(axis=1) / np.maximum(total[:, 0], 1)).max() * view.run.num_experts
    with parts.card(st, "training-6", "Expert load"):
        parts.chart(
            experts.experts_map(experts.depth_of(load), scale="uses", ranked=False),
            key="load",
            alt="Tokens routed to each expert of each layer",
            advice="A few strong squares: these experts learn the data; the others hardly change.",
            note=f"Tokens of the latest 200 steps; strongest = {int(load.max(initial=0)):,}. The busiest expert has "
            f"{busiest:.1f} times its even share.",
        )


frame.live_page(
    "Training",
    "A run of `twofold finetune`: what it learns, how fast, and which experts its tokens take.",
    body,
    kind="training",
)
