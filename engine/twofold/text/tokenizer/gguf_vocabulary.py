"""The vocabulary in a GGUF file → a backend of the `tokenizers` package with the same ids as llama.cpp.

Three kinds are supported: "gpt2" (byte-level BPE with a list of merges; `tokenizer.ggml.pre` names the
pre-tokenisation rule), "llama" (SentencePiece BPE: scores instead of merges, byte fallback) and "gemma4" (the same with
a list of merges). No normaliser runs, as in llama.cpp; Hugging Face's Qwen tokenizers compose characters first (NFC),
which typed text already is.

Harmless faults of converters are repaired and logged in one line, most of them as in llama.cpp: a token's text twice,
merges of tokens that the vocabulary lacks, ids beyond it, missing scores or types, the end of a turn without its type.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from twofold.api.errors import ModelLoadError
from twofold.text.tokenizer.word_rules import WORD_RULES

_log = logging.getLogger(__name__)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Values of tokenizer.ggml.token_type."""

_ROLES: Final = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",  # the format's own spelling
    "pad_token": "tokenizer.ggml.padding_token_id",
    "cls_token": "tokenizer.ggml.cls_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
_END_ROLES: Final = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)
_TURN_ENDS: Final = frozenset(("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"))
_END_TOKENS: Final = _TURN_ENDS | {"<|endoftext|>", "<|end_of_text|>", "</s>", "<|user|>", "<|observation|>"}
"""Control tokens, by their text, that end an answer even if the file names only one of them."""
_ALWAYS_CONTROL: Final = _TURN_ENDS | {
    "<|im_start|>",
    "<|start_header_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
}
"""Control tokens whatever type the file gives them: no text contains them otherwise."""
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-F]{2}>")
_HARMONY_ENDS: Final = frozenset(("<|return|>", "<|call|>"))
"""End tokens of gpt-oss's harmony format, in which <|end|> ends one message of an answer that continues."""

_MAX_CUT_CHARS: Final = 2**26
"""Limit of characters copied to find a SentencePiece vocabulary's merges; the largest need less than a third of it."""


@dataclass(frozen=True)
class GgufVocabulary:
    """A GGUF file's data about its tokens, as `Tokenizer` takes it."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    """Role → token, e.g. "eos_token" → "<|im_end|>"."""
    eos_token_ids: frozenset[int]
    repeated: Mapping[int, int]
    """Ids whose text an earlier id has → that id. The backend does not know them."""


def read_vocabulary(fields: Mapping[str, Any], where: str) -> GgufVocabulary:
    """The vocabulary in a GGUF file's metadata. Raises ModelLoadError naming the file and the fault."""
    return _Reader(fields, where).read()


class _Reader:
    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields = fields
        self._where = where
        self._tokens: list[str] = []
        self._types: list[int] = []
        self._warned: set[str] = set()

    def read(self) -> GgufVocabulary:
        kind = self._text("tokenizer.ggml.model", "")
        if kind not in ("gpt2", "llama", "gemma4"):
            known = f"tokenizer.ggml.model is {kind!r}" if kind else "there is no tokenizer in it"
            raise self._error(
                f"{known}, expected 'gpt2', 'llama' or 'gemma4'; give the tokenizer of the original model with "
                "--tokenizer DIR"
            )
        tokens = self._strings("tokenizer.ggml.tokens")
        if not tokens:
            raise self._error("tokenizer.ggml.tokens is empty, expected the vocabulary; download it again")
        self._tokens = tokens
        vocabulary: dict[str, int] = {}
        for index, token in enumerate(tokens):
            vocabulary.setdefault(token, index)
        repeated = {
            index: vocabulary[token] for index, token in enumerate(tokens) if vocabulary[token] != index
        }
        if repeated:
            index, first = next(iter(repeated.items()))
            self._warn_once(f"{len(repeated)} tokens repeat another's text, such as {index} that of {first}")
        special_tokens = self._special_tokens()
        self._types = self._read_types(kind, frozenset(special_tokens.values()))
        try:
            if kind == "gpt2":
                backend = self._byte_level(vocabulary, special_tokens)
            else:
                backend = self._sentencepiece(vocabulary, special_tokens, gemma=kind == "gemma4")
            self._add_special(backend)
        except ModelLoadError:
            raise
        except Exception as error:  # the package raises plain Exception for unusable input
            reason = " ".join(str(error).split())[:200]
            raise self._error(f"not a valid tokenizer: {reason}; convert the model again") from None
        return GgufVocabulary(backend, special_tokens, self._eos_token_ids(), repeated)

    def _read_types(self, kind: str, special: frozenset[str]) -> list[int]:
        """Types of all tokens; without such a list, those that the tokens' texts and roles imply."""
        listed = self._numbers("tokenizer.ggml.token_type", len(self._tokens))
        if listed is None:
            self._warn_once(
                "tokenizer.ggml.token_type is missing: types follow from the tokens' texts and roles"
            )
            of_bytes = _BYTE_TOKEN.fullmatch if kind != "gpt2" else lambda token: None
            return [
                _CONTROL
                if token in special or token in _ALWAYS_CONTROL
                else _BYTE
                if of_bytes(token)
                else _NORMAL
                for token in self._tokens
            ]
        types = [int(value) for value in listed]
        others = [
            index
            for index, token in enumerate(self._tokens)
            if token in _ALWAYS_CONTROL and types[index] not in (_CONTROL, _UNKNOWN)
        ]
        if others:
            self._warn_once(f"token {self._tokens[others[0]]!r} is not of type control: taken as such")
        for index in others:
            types[index] = _CONTROL
        return types

    def _byte_level(
        self, vocabulary: dict[str, int], special_tokens: Mapping[str, str]
    ) -> tokenizers.Tokenizer:
        name = self._text("tokenizer.ggml.pre", "")
        if not name:
            self._warn_once(
                "tokenizer.ggml.pre is missing: words are cut by the oldest files' rule, prompts may differ"
            )
            name = "default"
        rule = WORD_RULES.get(name)
        if rule is None:
            raise self._error(
                f"tokenizer.ggml.pre is {name!r}, expected one of {', '.join(sorted(WORD_RULES))}; give the tokenizer "
                "of the original model with --tokenizer DIR"
            )
        backend = tokenizers.Tokenizer(
            models.BPE(vocab=vocabulary, merges=self._merges(vocabulary), ignore_merges=rule.whole_words)
        )
        backend.pre_tokenizer = rule.pre_tokenizer()
        backend.decoder = decoders.ByteLevel()
        if self._flag("tokenizer.ggml.add_bos_token", rule.adds_bos):
            self._begin_with_bos(backend, special_tokens)
        return backend

    def _merges(self, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
        listed = self._strings("tokenizer.ggml.merges")
        if not listed:
            raise self._error(
                "tokenizer.ggml.merges is missing or empty, expected the merges of the vocabulary (without them every "
                "prompt has other tokens); convert the model again or give the tokenizer of the original model with "
                "--tokenizer DIR"
            )
        merges: list[tuple[str, str]] = []
        left_out: list[str] = []
        for merge in listed:
            # A token may begin with a space, so the separator is searched after its first character.
            left, right = merge[:1] + merge[1:].partition(" ")[0], merge[1:].partition(" ")[2]
            if left in vocabulary and right in vocabulary and left + right in vocabulary:
                merges.append((left, right))
            else:
                left_out.append(merge)
        if 2 * len(left_out) > len(listed):
            raise self._error(
                f"merge {left_out[0]!r} and {len(left_out) - 1} of {len(listed)} more are not two of its tokens with a "
                "space between that make a third; convert it again"
            )
        if left_out:
            self._warn_once(
                f"{len(left_out)} merges are left out, whose tokens it lacks, such as {left_out[0]!r}"
            )
        return list(dict.fromkeys(merges))  # the first of equal ones counts

    def _sentencepiece(
        self, vocabulary: dict[str, int], special_tokens: Mapping[str, str], *, gemma: bool
    ) -> tokenizers.Tokenizer:
        scores = None if gemma else self._numbers("tokenizer.ggml.scores", len(self._tokens))
        if scores is None and not gemma and not self._strings("tokenizer.ggml.merges"):
            # Trained vocabularies list tokens from the best on.
            self._warn_once("tokenizer.ggml.scores is missing: the order of the tokens is taken for them")
            scores = range(0, -len(self._tokens), -1)
        merges = self._merges(vocabulary) if scores is None else self._merges_of_scores(vocabulary, scores)
        unknown = special_tokens.get("unk_token")
        if unknown is None and _UNKNOWN in self._types:
            unknown = self._tokens[self._types.index(_UNKNOWN)]
        backend = tokenizers.Tokenizer(
            models.BPE(
                vocab=vocabulary,
                merges=merges,
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=_BYTE in self._types,
            )
        )
        adds_space = self._flag("tokenizer.ggml.add_space_prefix", not gemma)
        prefix = [normalizers.Prepend("▁")] if adds_space else []
        backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
        strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        # Gemma's template writes the token itself; the flag in its files would add a second one before it.
        if not gemma and self._flag("tokenizer.ggml.add_bos_token", True):
            self._begin_with_bos(backend, special_tokens)
        return backend

    def _merges_of_scores(
        self, vocabulary: Mapping[str, int], scores: Sequence[float]
    ) -> list[tuple[str, str]]:
        """SentencePiece merges the neighbours with the best union score: every split of a token, best token first."""
        mergeable = [
            token
            for token, kind in zip(self._tokens, self._types, strict=True)
            if kind in (_NORMAL, _USER_DEFINED, _UNUSED) and len(token) > 1
        ]
        if sum(len(token) ** 2 for token in mergeable) > _MAX_CUT_CHARS:
            raise self._error("its tokens are longer than any vocabulary's; download it again")
        ranked: list[tuple[float, int, int, str, str]] = []
        for token in mergeable:
            score = -float(scores[vocabulary[token]])
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in vocabulary and right in vocabulary:
                    ranked.append((score, vocabulary[left], vocabulary[right], left, right))
        ranked.sort()
        return [(left, right) for _, _, _, left, right in ranked]

    def _add_special(self, backend: tokenizers.Tokenizer) -> None:
        """Add control tokens, matched in text and hidden in answers, and user-defined ones, matched and shown."""
        control, shown = [], []
        for token, kind in zip(self._tokens, self._types, strict=True):
            if not token:
                continue
            if kind in (_CONTROL, _UNKNOWN):
                control.append(AddedToken(token, special=True, normalized=False))
            elif kind == _USER_DEFINED:
                shown.append(AddedToken(token, special=False, normalized=False))
        backend.add_special_tokens(control)
        backend.add_tokens(shown)

    def _begin_with_bos(self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
        bos = special_tokens.get("bos_token")
        if bos is not None:
            backend.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"],
                pair=[bos, "$A", bos, "$B"],
                special_tokens=[(bos, self._tokens.index(bos))],
            )

    def _special_tokens(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for role, key in _ROLES.items():
            index = self._token_id(key)
            if index is not None:
                found[role] = self._tokens[index]
        return found

    def _eos_token_ids(self) -> frozenset[int]:
        named = {index for index in map(self._token_id, _END_ROLES) if index is not None}
        harmony = set(self._tokens) >= _HARMONY_ENDS
        ends = _END_TOKENS - {"<|end|>"} | _HARMONY_ENDS if harmony else _END_TOKENS
        by_text = {
            index
            for index, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if kind == _CONTROL and token in ends
        }
        return frozenset(named | by_text)

    def _token_id(self, key: str) -> int | None:
        value = self._fields.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._error(f"{key} is {value!r}, expected a token id; convert it again")
        if value == 2**32 - 1:  # -1, written unsigned: no such token
            return None
        if not 0 <= value < len(self._tokens):
            self._warn_once(f"{key} is {value}, expected an id below {len(self._tokens)}: left out")
            return None
        return value

    def _warn_once(self, what: str) -> None:
        """Log a fault that does not keep the vocabulary from being read."""
        if what not in self._warned:
            self._warned.add(what)
            _log.warning("%s: %s", self._where, what)

    def _text(self, key: str, default: str) -> str:
        value = self._fields.get(key, default)
        if not isinstance(value, str):
            raise self._error(f"{key} is {value!r}, expected a string; convert the model again")
        return value

    def _flag(self, key: str, default: bool) -> bool:
        value = self._fields.get(key, default)
        if not isinstance(value, bool):
            raise self._error(f"{key} is {value!r}, expected true or false; convert the model again")
        return value

    def _strings(self, key: str) -> list[str]:
        value = self._fields.get(key)
        # A list without strings may be stored as an empty array of numbers.
        if isinstance(value, list):
            return value
        if value is None or (isinstance(value, np.ndarray) and not value.size):
            return []
        raise self._error(f"{key} is not a list of strings; convert the model again")

    def _numbers(self, key: str, count: int) -> Sequence[float] | None:
        value = self._fields.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or len(value) < count:
            raise self._error(f"{key} is not a list of {count} numbers; convert the model again")
        value = value[:count]
        if not np.all(np.isfinite(value)):
            raise self._error(f"{key} holds a number that is not finite; convert the model again")
        numbers: list[float] = value.tolist()
        return numbers

    def _error(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self._where}: {reason}")
