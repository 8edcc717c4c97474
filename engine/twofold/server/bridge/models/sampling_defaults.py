"""Sampling defaults: the model's generation_config.json first, OpenAI's defaults for the rest."""

from __future__ import annotations

from pathlib import Path

from twofold.api.types import SamplingParams
from twofold.models import read_config

OPENAI_DEFAULTS = SamplingParams(temperature=1.0, top_p=1.0)


def sampling_defaults(model_directory: Path) -> SamplingParams:
    """The defaults of the model in `model_directory`. ModelLoadError for a damaged generation_config.json."""
    model = read_config(model_directory)
    reply = model.generation
    return SamplingParams(
        temperature=OPENAI_DEFAULTS.temperature if reply.temperature is None else reply.temperature,
        top_p=OPENAI_DEFAULTS.top_p if reply.top_p is None else reply.top_p,
        top_k=reply.top_k or 0,
        min_p=reply.min_p or 0.0,
        repetition_penalty=reply.repetition_penalty or 1.0,
    )
