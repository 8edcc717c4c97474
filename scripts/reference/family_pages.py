"""The page of model families' layers."""

from __future__ import annotations

from twofold.models.layer_description import describe_layers, example_config
from twofold.models.registry import FAMILIES, describe_family


def layers_of_families() -> str:
    """Each family's layers, part by part, as `twofold models FAMILY` prints them."""
    sections = [
        f"## {family.module}\n\n{describe_family(family)}\n\n```\n"
        + "\n".join(describe_layers(example_config(family)))
        + "\n```"
        for family in FAMILIES
    ]
    intro = (
        "`twofold models FAMILY` prints the same for one family. Each layer's blocks and their parts stand in the "
        "order of\ncomputation. Sizes are those of transformers' default configuration. A position's cost is that "
        "of a device, with keys and\nvalues in bf16."
    )
    return "\n\n".join([intro, *sections])
