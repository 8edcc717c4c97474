"""Changed configurations of all families: each key of config.json deleted, null, or under its other name.

transformers' configuration class is the judge. What it makes of a changed file is a whole configuration again, and our
reading of both must be the same. Where null stays null in it, its model decides (`nulls_that_stay`).
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import transformers
from twofold.api.errors import ModelLoadError
from twofold.blocks.gqa import Gqa
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.config_json import architecture_name
from twofold.models.keys import ALSO
from twofold.models.registry import family_of
from twofold.weights.json_file import Fields

from tests.tiny_models.table import EXAMPLES

MODELS: Final = EXAMPLES
_OF_THE_LIBRARY: Final = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
_TOKENS: Final = ("bos_token_id", "pad_token_id", "eos_token_id")
"""Settings of the tokenizer; their defaults are outside a tiny vocabulary."""


def whole_config(config: dict[str, Any]) -> Any:
    """transformers' configuration. Raises anything where it refuses the file."""
    kinds = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    return kinds[config["model_type"]].from_dict(copy.deepcopy(config))


def as_json(config: Any, base: dict[str, Any]) -> dict[str, Any]:
    """A whole configuration as config.json of the same classes."""
    text = json.dumps(config.to_dict(), default=lambda value: str(value).removeprefix("torch."))
    found: dict[str, Any] = json.loads(text)
    for part, own in ((found, base), (found.get("text_config", {}), base.get("text_config", {}))):
        for key in _TOKENS:
            part.pop(key, None)
            part.update({key: own[key]} if key in own else {})
    return found | {"architectures": base["architectures"]}


def ours(config: dict[str, Any]) -> ModelConfig | str:
    """What is computed of a config.json; the message if it is refused."""
    fields = Fields("config.json", config, also=ALSO)
    try:
        family = family_of(architecture_name(fields), config=config)
        found = family.parse_config(fields, GenerationDefaults()).validate("config.json")
    except ModelLoadError as error:
        return str(error)
    layers = tuple(tuple(map(_with_scale, layer)) for layer in found.layers)
    unread: dict[str, Any] = dict.fromkeys(_TOKENS[:2]) | {"eos_token_ids": (), "dtype": "float32"}
    return replace(found, layers=layers, ignored=(), left_out=(), mtp=None, **unread)


def _with_scale(block: Any) -> Any:
    """The block with the scale of its scores written out where it is the usual one."""
    return replace(block, scores=block.scores.of(block.head_dim)) if isinstance(block, Gqa) else block


def changes(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what is changed, the changed config.json) of every key of the text part, and of its class."""
    nested = isinstance(config.get("text_config"), dict)
    text: dict[str, Any] = config["text_config"] if nested else config

    def put(changed: dict[str, Any]) -> dict[str, Any]:
        return config | {"text_config": changed} if nested else changed

    kind = type(whole_config(config).get_text_config())
    unswept = {"architectures", "model_type", "per_layer_config", *_TOKENS, *_OF_THE_LIBRARY} - {"dtype"}
    keys = [key for key in text if key not in unswept]
    for key in keys:
        yield f"{key} deleted", put({name: value for name, value in text.items() if name != key})
    further = [field.name for field in dataclasses.fields(kind) if field.name not in unswept]
    for key in dict.fromkeys([*keys, *further]):
        yield f"{key} null", put(text | {key: None})
    for one, other in kind.attribute_map.items():
        for old, new in ((one, other), (other, one)):
            if old in text:
                yield f"{old} as {new}", put({new if k == old else k: v for k, v in text.items()})


def stays_null(change: str, whole: Any) -> bool:
    """Whether a key set to null is null in the whole configuration, and has another default."""
    text, key = whole.get_text_config(), change.removesuffix(" null")
    if key == change:
        return False
    return text.to_dict().get(key, 0) is None and getattr(type(text)(), key, None) is not None
