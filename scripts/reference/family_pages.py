"""The pages of model families: their layers, and the families that do not run yet."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from twofold.models.layer_description import describe_layers, example_config
from twofold.models.registry import ARCHITECTURES, FAMILIES, describe_family
from twofold.models.unsupported import missing_part


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


def models_that_do_not_run_yet() -> str:
    """Mixtures of experts of transformers that are refused, each with the part that it needs."""
    import transformers

    missing: dict[str, set[str]] = defaultdict(set)
    for name, config in _mixtures():
        if name not in ARCHITECTURES:
            missing[missing_part(name, config).removeprefix("it needs ")].add(f"`{name}`")
    rows = [f"| {part} | {', '.join(sorted(names))} |" for part, names in sorted(missing.items())]
    release = transformers.__version__.rsplit(".", 1)[0]
    intro = (
        f"The mixtures of experts that transformers {release} runs and Twofold refuses, by the part that is missing.\n"
        "A checkpoint of one is refused with the same words. `twofold models` lists what runs."
    )
    return "\n".join([intro, "", "| what is missing | classes |", "|---|---|", *rows])


def _mixtures() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Class and default configuration of each decoder of transformers whose configuration counts experts."""
    from transformers.models.auto import configuration_auto, modeling_auto

    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        for model_type, names in mapping.items():
            if model_type.endswith("_assistant"):  # drafts for another model, and has no defaults
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = configuration_auto.CONFIG_MAPPING[model_type]().to_dict()
            if "num_experts_per_tok" in str(config) or "moe_" in str(config):
                yield from ((name, config) for name in ([names] if isinstance(names, str) else names))
