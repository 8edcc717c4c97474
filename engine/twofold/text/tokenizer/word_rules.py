"""Pre-tokenisation rules of byte-level vocabularies (splitting text into words before merging), by their GGUF names.

The patterns are those of the models' own tokenizers; `&&` intersects character classes, as in the `tokenizers`
package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{end}|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{end}|"
)
_CASED_BUT_HAN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+{end}|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*{end}|"
)
_CASED_TAIL: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class WordRule:
    """A rule to split text into words before merging; each pattern splits the pieces of the previous one."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    """A word that is in the vocabulary becomes that token, whatever the merges are."""
    adds_bos: bool = False
    """Default if the file has no tokenizer.ggml.add_bos_token."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Splits into words, spelled in the byte-level alphabet."""
        return pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )


_QWEN2: Final = WordRule((_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL,))
_QWEN35: Final = WordRule(
    (
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_LLAMA3_PATTERNS: Final = (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL,)
_LLAMA3: Final = WordRule(_LLAMA3_PATTERNS, whole_words=True, adds_bos=True)
_GPT2_RULE: Final = WordRule((_GPT2,))
_GPT4O: Final = WordRule((_CASED.replace("{end}", _CONTRACTIONS + "?") + r"\p{N}{1,3}" + _CASED_TAIL,))
KIMI_K2: Final = WordRule(
    (r"\p{Han}+|" + _CASED_BUT_HAN.replace("{end}", _CONTRACTIONS + "?") + r"\p{N}{1,3}" + _TAIL,)
)
_DIGIT_BY_DIGIT: Final = WordRule((r"\p{N}", _GPT2))
# Cased letters of the Unicode version that the rule was made with.
_CASED_LETTERS: Final = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10c7}-\x{10cd}\x{10d0}-\x{10ff}\x{1c80}-\x{1c88}\x{2d00}-\x{2d2d}"
    r"\x{a790}-\x{a7fa}\x{ab30}-\x{ab68}\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7cb}\x{1df00}-\x{1df2a}]]"
)
_HAN: Final = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_DEEPSEEK_V2: Final = WordRule(
    (
        r"[\r\n]",
        rf"\s?{_CASED_LETTERS}+",
        r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
        r"\s+$",
        _HAN,
        r"\p{N}+",
    )
)
_DEEPSEEK_V3: Final = WordRule(
    (
        r"\p{N}{1,3}",
        r"[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
WORD_RULES: Final[Mapping[str, WordRule]] = {
    "default": WordRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), WordRule(_LLAMA3_PATTERNS)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"), _GPT2_RULE),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell"), _DIGIT_BY_DIGIT),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _GPT4O),
    "deepseek-llm": _DEEPSEEK_V2,
    "deepseek-coder": WordRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    "deepseek-v3": _DEEPSEEK_V3,
    "kimi-k2": KIMI_K2,
    "tekken": WordRule(
        (_CASED.replace("{end}", "") + r"\p{N}" + _CASED_TAIL,), whole_words=True, adds_bos=True
    ),
}
