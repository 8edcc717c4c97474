"""The value of `--speculative-config`: which drafter proposes tokens, and how many."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Final, Literal

from twofold.api.errors import ConfigError

METHODS: Final = ("ngram", "prediction", "mtp")
"""Drafters that `method` takes."""
_MTP: Final = (
    "deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "ernie_mtp", "nextn", "NEXTN",
    "draft-mtp",
)  # fmt: skip
"""Names of the method mtp in vLLM, SGLang and llama.cpp."""
MAX_DEPTH: Final = 16
_FLAG: Final = "--speculative-config"
_RANGES: Final = {
    "num_speculative_tokens": (1, MAX_DEPTH),
    "prompt_lookup_min": (1, 64),
    "prompt_lookup_max": (1, 64),
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """Drafter and depth of speculative decoding, with vLLM's keys. Outputs do not depend on it.

    Raises:
        ConfigError: a value is out of range.
    """

    method: str = "prediction"
    """ngram: text that follows earlier occurrences of a request's newest tokens. mtp: the model's own prediction layer.
    prediction: only what a request's own `prediction` foretells; the default without the flag."""
    num_speculative_tokens: int = 8
    """Most drafted tokens per request and step."""
    prompt_lookup_min: int = 3
    """Shortest match of the newest tokens with earlier text, in tokens."""
    prompt_lookup_max: int = 32
    """Longest match that is compared, in tokens."""
    adaptive: bool = True
    """Choose each step's depth by its price; False: always draft as many tokens as allowed."""

    @property
    def predictions(self) -> Literal["skip", "need"]:
        """Whether the model's prediction layer is opened (`models.open_model_files`)."""
        return "need" if self.method == "mtp" else "skip"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"{_FLAG}: method was given {self.method!r}; it takes {', '.join(METHODS)}")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(
                    f"{_FLAG}: {name} was given {value!r}; it takes a whole number from {low} to {high}"
                )
        if type(self.adaptive) is not bool:
            raise ConfigError(f"{_FLAG}: adaptive was given {self.adaptive!r}; it takes true or false")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"{_FLAG}: prompt_lookup_min {self.prompt_lookup_min} is above prompt_lookup_max "
                f"{self.prompt_lookup_max}; lower it"
            )


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Read the flag's JSON object. vLLM's `"model": "ngram"` without a method is the method ngram.

    Raises:
        ConfigError: it is no JSON object, has an unknown key, or a value is out of range.
    """
    try:
        given: Any = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ConfigError(f"{_FLAG} was given {text[:200]!r}; it takes a JSON object such as {_EXAMPLE}")
    if given.get("model") in ("ngram", "[ngram]") and "method" not in given:
        given["method"] = given.pop("model").strip("[]")
    if given.get("method") in _MTP:
        given["method"] = "mtp"
    known = [field.name for field in dataclasses.fields(SpeculativeConfig)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"{_FLAG}: {unknown[0]!r} is no key; it takes {', '.join(known)}")
    if "method" not in given:
        raise ConfigError(f"{_FLAG}: method is missing; it takes {', '.join(METHODS)}")
    return SpeculativeConfig(**given)


_EXAMPLE: Final = json.dumps({"method": "ngram", "num_speculative_tokens": 4})
