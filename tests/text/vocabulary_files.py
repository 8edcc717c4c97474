"""Hard strings, a trained byte-level vocabulary, and the files in which publishers store one."""

from __future__ import annotations

import base64
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers
from twofold.text.tokenizer.pieces import character_of_byte

ROOT = Path(__file__).resolve().parents[2]
MANY = pytest.mark.parametrize("num_texts", [300, pytest.param(10_000, marks=pytest.mark.slow)])
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SCRAPS = (
    "the ", "The king's", " don't", "I'LL", "it'Re ", "HTTPServer", "camelCaseWord", "ÀÉÎ",
    "naïve", "straße", "Ωμέγα", "привет мир", "日本語のテスト", "中文，没有空格。", "한국어", "हिन्दी", "ไทย",
    "עברית", "العربية", "ǅungla", "ﬁne", "e\u0301", "👍🏽", "👩‍👩‍👧", "🇩🇪", "\U0001f600",
    "12345678901", "3.14159", "1,000", "٣٤", "½", "²", "{}", "();", "!=", "->", "/* x */",
    "#include <a>\n", "def f(x):\n    return x\n", "\t\tif a:\r\n", "</div>", "a/b/c",
    "\n\n\n", "\r\n", "  ", "    ", "\u00a0", "\u3000", "\u200b", "\t", " ", "\u2028",
    "...", "—", "«quoted»", "“so”", "@user", "x_y-z", "ſ", "K", "<|im", "|>", "<|im_end|>",
    "<think>", "\x00", "\x7f", "￿",
)  # fmt: skip


def texts(count: int) -> list[str]:
    r = random.Random(1)
    drawn = ["".join(r.choice(SCRAPS) for _ in range(r.randint(0, 12))) for _ in range(count * 9 // 10)]
    ranges = ((0x20, 0x7F), (0x80, 0x3000), (0x3000, 0xD7FF), (0xE000, 0x10FFFF))
    for _ in range(count - len(drawn)):
        points = (r.randrange(*r.choice(ranges)) for _ in range(r.randint(1, 30)))
        drawn.append("".join(map(chr, points)))
    return drawn


@cache
def trained_ranks() -> dict[bytes, int]:
    """Ranks of a byte-level vocabulary, bytes first, trained on the project's own pages and the scraps."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pages = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/**/*.md"))]
    alphabet = list(character_of_byte().values())
    trained.train_from_iterator(
        [*pages, *SCRAPS * 5],
        trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False),
    )
    byte_of = {character: byte for byte, character in character_of_byte().items()}
    merges = [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    found = {bytes((byte,)): byte for byte in range(256)}
    for merge in merges:
        found.setdefault(bytes(byte_of[c] for c in "".join(merge)), len(found))
    return found


def spelled(token: bytes) -> str:
    return "".join(character_of_byte()[byte] for byte in token)


def control_free(texts: list[str]) -> list[str]:
    return [text for text in texts if not any(token in text for token in CONTROL)]


# Tools as JSON in ASCII, contents trimmed, an answer cut at a mark.
CHAT = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson(ensure_ascii=true) }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiktoken(directory: Path, ranks: dict[bytes, int]) -> Path:
    lines = (base64.b64encode(token) + b" " + str(rank).encode() for token, rank in ranks.items())
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    added = {str(len(ranks) + at): {"content": token, "special": True} for at, token in enumerate(CONTROL)}
    added[str(len(ranks) + 9)] = {"content": "<think>", "special": False}
    config = {"added_tokens_decoder": added, "eos_token": "<|im_end|>", "chat_template": CHAT}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
)


def write_tekken(directory: Path, ranks: dict[bytes, int], **changes: Any) -> Path:
    """Ten control tokens, of which two have names; one token more than the default size uses."""
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    data = {
        "config": {
            "pattern": TEKKEN, "num_vocab_tokens": len(vocab), "default_num_special_tokens": 10, "version": "v11",
            "default_vocab_size": len(vocab) + 9,
        },
        "vocab": vocab,
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True} for rank, text in ((1, "<s>"), (2, "</s>"))
        ],
    }  # fmt: skip
    (directory / "tekken.json").write_text(json.dumps(data | changes))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": CHAT}))
    return directory
