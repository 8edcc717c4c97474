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
_TRIPLES: Final = (r"\p{N}+", r"\A\p{N}{1,2}(?=(?:\p{N}{3})+\z)", r"\p{N}{3}")
"""Digits in groups of three, counted from the right; each step is linear in the number of digits."""
_ASIAN: Final = (
    r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{f900}-\x{faff}\x{3040}-\x{30ff}\x{ff65}-\x{ff9f}\x{2f00}-\x{2fdf}"
    r"\x{e40}-\x{e7f}\x{e80}-\x{eff}\x{1780}-\x{17ff}\x{1000}-\x{109f}\x{aa60}-\x{aa7f}\x{a9e0}-\x{a9ff}"
    r"\x{ac00}-\x{d7af}\x{1100}-\x{11ff}]+"
)
_AFMOE: Final = WordRule((*_TRIPLES, _ASIAN, _DEEPSEEK_V3.patterns[-1]))
# Words with single spaces between them stay together.
_EXAONE_MOE: Final = WordRule(
    (
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_SEED_CODER: Final = WordRule(
    (
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_BAILING: Final = WordRule(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_LINES: Final = r"[^\n]+|\n+"
_NO_PUNCTUATION: Final = r" ?[^(\s|.,!?…。，、।۔،)]+"
WORD_RULES: Final[Mapping[str, WordRule]] = {
    "default": WordRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys((
        "qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2", "kormo", "f2llmv2",
    ), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys((
        "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0", "jina-v5-nano",
    ), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "glm5", "chatglm-bpe"), WordRule(_LLAMA3_PATTERNS)),
    **dict.fromkeys((
        "gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "gigachat", "a.x-4.0", "mellum", "trillion",
        "granite-docling",
    ), _GPT2_RULE),
    **dict.fromkeys((
        "starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2",
    ), _DIGIT_BY_DIGIT),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2", "talkie"), _GPT4O),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), WordRule((_NO_PUNCTUATION,))),
    "viking": WordRule((_NO_PUNCTUATION, r"\p{N}")),
    "afmoe": _AFMOE,
    "exaone-moe": _EXAONE_MOE,
    "seed-coder": _SEED_CODER,
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "laguna": WordRule((_LINES, *_QWEN2.patterns)),
    "minicpm5": WordRule(
        (r"\p{N}{1,3}", _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+" + _TAIL), whole_words=True
    ),
    "deepseek-llm": _DEEPSEEK_V2,
    "deepseek-coder": WordRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK_V3),
    "kimi-k2": KIMI_K2,
    "tekken": WordRule(
        (_CASED.replace("{end}", "") + r"\p{N}" + _CASED_TAIL,), whole_words=True, adds_bos=True
    ),
}  # fmt: skip
