"""Parts of request bodies that every API's schemas share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

Unlisted = SkipJsonSchema[Any]
"""Leaves refused fields out of /openapi.json."""


def refused(why: str) -> Any:
    """Type of a field that is accepted only with an empty value."""

    def check(value: Any) -> None:
        if value not in (None, False, "", [], {}):
            raise ValueError(f"not supported: {why}")

    return Annotated[Unlisted, AfterValidator(check)]


class Body(BaseModel):
    """Base of request bodies: unknown fields are ignored, as clients send many."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), allow_inf_nan=False)


ModelName = Annotated[str, Field(max_length=512)]


class LoraScale(Body):
    """An adapter by its id in GET /lora-adapters, and the scale of its change, as in llama.cpp."""

    id: Annotated[int, Field(ge=0)]
    scale: float


LoraScales = Annotated[list[LoraScale], Field(max_length=64, fail_fast=True)]
