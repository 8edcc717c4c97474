"""Request body of POST /infill."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, Field

from twofold.server.http.bodies import LoraScales, ModelName
from twofold.server.openai.messages import Text
from twofold.server.openai.schemas import MAX_INT64, PassedSampling

_MAX_FILES: Final = 1024
_MAX_RESPONSE_FIELDS: Final = 64


class InfillFile(BaseModel):
    """A part of another file."""

    text: Text = ""
    filename: Annotated[str, Field(max_length=4096)] = "tmp"


class InfillRequest(PassedSampling):
    """Body of POST /infill, with llama.cpp's names. Unlisted fields are ignored, limits of time among them."""

    model: ModelName | None = None
    lora: LoraScales | None = None
    """Adapters with their scales, in place of one that `model` names."""
    input_prefix: Text
    """Text before the gap."""
    input_suffix: Text
    """Text after the gap."""
    input_extra: Annotated[list[InfillFile], Field(max_length=_MAX_FILES, fail_fast=True)] | None = None
    """Parts of other files. The first ones are left out if the context cannot hold all."""
    prompt: Text | None = None
    """Text between `input_prefix` and the gap."""
    n_predict: Annotated[int, Field(ge=-2, le=MAX_INT64)] | None = None
    """Longest answer in tokens; below 0, the default: limited by the context."""
    repeat_penalty: float | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    response_fields: (
        Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=_MAX_RESPONSE_FIELDS)] | None
    ) = None
    """Paths such as `timings/prompt_n` that the whole answer, or a stream's last event, has instead of all fields."""

    def completion_fields(self) -> dict[str, Any]:
        """The same request to /v1/completions, without its texts."""
        limit = -1 if self.n_predict is None else max(-1, self.n_predict)
        return self.passed_on() | {
            # llama.cpp's -1 draws a seed.
            "seed": None if self.seed == -1 else self.seed,
            "max_tokens": limit,
            "repetition_penalty": self.repeat_penalty,
            "ignore_eos": self.ignore_eos,
            "stream": self.stream,
            "return_speed": True,
        }
