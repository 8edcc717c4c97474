"""Pooling: one vector of a prompt instead of an answer, as one request asks for it and as a model's files set it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast, get_args

from twofold.api.errors import ConfigError

PoolingKind = Literal["last", "mean", "cls"]
POOLING_KINDS: Final[tuple[PoolingKind, ...]] = get_args(PoolingKind)
_FLAG: Final = "--pooler-config"
_DEFAULT: Final = "the default"
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
QWEN_PAIR: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)
"""Qwen3-Reranker's prompt as its model card publishes it."""
_EXAMPLE: Final = '{"pooling_type": "MEAN", "normalize": true}'


@dataclass(frozen=True)
class Pooling:
    """Output per prompt: hidden states after the last norm, pooled, f32 [hidden]."""

    kind: PoolingKind = "last"
    """last: the last token's. mean: the mean over all tokens. cls: the first token's."""
    normalise: bool = True
    """Divide the vector by its Euclidean norm."""
    dimensions: int | None = None
    """Keep this many leading elements, before they are normalised; None: all."""
    tokens: tuple[int, ...] = ()
    """The logits of these tokens after the prompt instead, as they are: f32 [tokens]."""


@dataclass(frozen=True)
class PoolerConfig:
    """The value of `--pooler-config`, with vLLM's keys; what is None follows from the model's files."""

    kind: PoolingKind | None = None
    normalise: bool | None = None
    is_matryoshka: bool | None = None
    """Whether shorter vectors may be asked for."""
    dimensions: tuple[int, ...] = ()
    """The lengths that may be asked for; empty: any, if `is_matryoshka`."""
    classifier: tuple[str, str] | None = None
    """Tokens for "irrelevant" and "relevant", whose logits rank documents."""


@dataclass(frozen=True)
class ModelPooling:
    """How a model pools, unless a request asks otherwise."""

    kind: PoolingKind = "last"
    normalise: bool = True
    is_matryoshka: bool = False
    dimensions: tuple[int, ...] = ()
    classifier: tuple[str, str] | None = None
    labels: tuple[int, ...] = ()
    """Rows of the model's own classifier that rank documents: the relevant one, or (irrelevant, relevant)."""
    num_labels: int = 0
    """Labels of the model's own classifier; 0: it has none."""
    pair_prompt: str = QWEN_PAIR
    """Prompt of a query and a document, with these as {query} and {document}; "": the tokenizer's pair of texts."""
    origin: str = _DEFAULT
    """Where `kind` comes from."""
    refusal: str = ""
    """Why the model's embeddings cannot be computed; empty: they can."""
    size: int = 0
    """Elements of a hidden state."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts by name that a request can have put before its inputs."""
    generates: bool = True
    """Whether the model has a head, so that it can also answer."""

    def describe(self) -> str:
        """One line for `doctor` and `models`."""
        if self.refusal:
            return f"none: {self.refusal}"
        scaled = "normalised" if self.normalise else "not normalised"
        ranks = "cosine of embeddings"
        if self.classifier is not None:
            ranks = "logits of {1!r} and {0!r}".format(*self.classifier)
        if self.num_labels:
            ranks = f"its classifier of {self.num_labels} label{'s' * (self.num_labels > 1)}"
        alone = "" if self.generates else "; no head, so nothing is generated"
        vector = f"{self.size} elements, {self.kind} pooling ({self.origin}), {scaled}"
        return f"{vector}; reranking by {ranks}{alone}"


def parse_pooler_config(text: str | None) -> PoolerConfig:
    """Read the flag's JSON object; None: an empty one.

    Raises:
        ConfigError: it is no JSON object, has an unknown key, or a value is out of range.
    """
    try:
        given: Any = json.loads(text or "{}")
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ConfigError(
            f"{_FLAG} was given {(text or '')[:200]!r}; it takes a JSON object such as {_EXAMPLE}"
        )
    found: dict[str, Any] = {}
    for key, value in given.items():
        if key not in _KEYS:
            raise ConfigError(f"{_FLAG}: {key!r} is no key; it takes {', '.join(_KEYS)}")
        name, read, expected = _KEYS[key]
        found[name] = read(value)
        if found[name] is None:
            raise ConfigError(f"{_FLAG}: {key} was given {value!r}; it takes {expected}")
    return PoolerConfig(**found)


def _kind(value: Any) -> PoolingKind | None:
    return next((kind for kind in POOLING_KINDS if str(value).lower() == kind), None)


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _lengths(value: Any) -> tuple[int, ...] | None:
    is_list = isinstance(value, list) and all(type(each) is int and each > 0 for each in value)
    return tuple(value) if is_list else None


def _pair(value: Any) -> tuple[str, str] | None:
    is_pair = isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)
    return cast(tuple[str, str], tuple(value)) if is_pair else None


_KINDS: Final = (_kind, "LAST, MEAN or CLS")
_BOOL: Final = (_flag, "true or false")
_KEYS: Final[dict[str, tuple[str, Any, str]]] = {
    "pooling_type": ("kind", *_KINDS),
    "seq_pooling_type": ("kind", *_KINDS),
    "normalize": ("normalise", *_BOOL),
    "use_activation": ("normalise", *_BOOL),
    "is_matryoshka": ("is_matryoshka", *_BOOL),
    "matryoshka_dimensions": ("dimensions", _lengths, "a list of whole numbers above 0"),
    "classifier_from_token": ("classifier", _pair, 'two tokens, such as ["no", "yes"]'),
}
