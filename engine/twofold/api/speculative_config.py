"""The value of `--speculative-config`: which drafter proposes tokens, and how many."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Final, Literal

from twofold.api.errors import ConfigError

METHODS: Final = ("ngram", "suffix", "mtp", "draft_model", "eagle3", "prediction")
"""Drafters that `method` takes."""
MODEL_METHODS: Final = ("draft_model", "eagle3")
"""Methods that need a draft model, which `model` names."""
MTP_NAMES: Final = (
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
    "suffix_decoding_max_tree_depth": (2, 64),
    "suffix_decoding_max_cached_requests": (0, 100_000),
}
_SHARES: Final = {
    "suffix_decoding_max_spec_factor": (0.0, 16.0),
    "suffix_decoding_min_token_prob": (0.0, 1.0),
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """Drafter and depth of speculative decoding, with vLLM's keys. Outputs do not depend on it.

    Raises:
        ConfigError: a value is out of range.
    """

    method: str = "prediction"
    """ngram: text that follows earlier occurrences of a request's newest tokens. suffix: the same with a suffix
    automaton, by frequency. mtp: the model's own MTP layer. draft_model, eagle3: a model of their own.
    prediction: only what a request's own `prediction` foretells; the default without the flag."""
    model: str | None = None
    """Directory or GGUF file of the draft model, or directory of the EAGLE-3 head."""
    num_speculative_tokens: int = 8
    """Most drafted tokens per request and step."""
    prompt_lookup_min: int = 3
    """Shortest match of the newest tokens with earlier text, in tokens."""
    prompt_lookup_max: int = 32
    """Longest match that is compared, in tokens."""
    suffix_decoding_max_tree_depth: int = 24
    """Longest context whose continuations are counted, in tokens."""
    suffix_decoding_max_cached_requests: int = 0
    """Finished requests whose answers are kept in memory and proposed to later requests; 0: none. A request can then
    be timed to learn whether its answer was given before."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Most drafted tokens as a multiple of the length of the match."""
    suffix_decoding_min_token_prob: float = 0.1
    """A draft ends where its tokens occurred together in less than this share of the matches."""
    adaptive: bool = True
    """Choose each step's depth by its price; False: always draft as many tokens as allowed."""

    @property
    def mtp_use(self) -> Literal["skip", "need"]:
        """Whether the model's MTP layer is opened (`models.open_model_files`)."""
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
        for name, (least, most) in _SHARES.items():
            value = getattr(self, name)
            if type(value) not in (int, float) or not least <= value <= most:
                raise ConfigError(
                    f"{_FLAG}: {name} was given {value!r}; it takes a number from {least} to {most}"
                )
        self._check_model()
        if type(self.adaptive) is not bool:
            raise ConfigError(f"{_FLAG}: adaptive was given {self.adaptive!r}; it takes true or false")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"{_FLAG}: prompt_lookup_min {self.prompt_lookup_min} is above prompt_lookup_max "
                f"{self.prompt_lookup_max}; lower it"
            )

    def _check_model(self) -> None:
        if self.method not in MODEL_METHODS:
            if self.model is not None:
                raise ConfigError(
                    f"{_FLAG}: model was given {self.model!r}, and method {self.method} has none; leave it out, or "
                    f"give method {' or '.join(MODEL_METHODS)}"
                )
        elif not isinstance(self.model, str) or not self.model:
            given = "not given" if self.model is None else f"given {self.model!r}"
            raise ConfigError(f"{_FLAG}: model was {given}; method {self.method} takes the path of its model")


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Read the flag's JSON object. As with vLLM, `"model": "ngram"` without a method is the method
    ngram, and another model without one is a draft model.

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
    if given.get("method") in MTP_NAMES:
        given["method"] = "mtp"
    known = [field.name for field in dataclasses.fields(SpeculativeConfig)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"{_FLAG}: {unknown[0]!r} is no key; it takes {', '.join(known)}")
    if "method" not in given and "model" in given:
        given["method"] = "draft_model"  # as vLLM reads it
    if "method" not in given:
        raise ConfigError(f"{_FLAG}: method is missing; it takes {', '.join(METHODS)}")
    return SpeculativeConfig(**given)


_EXAMPLE: Final = json.dumps({"method": "ngram", "num_speculative_tokens": 4})
