"""Model directories as their publishers upload them: every layout of tokenizer and chat template is read."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, Final

import pytest
import tokenizers
import transformers
from twofold.api.errors import ModelLoadError
from twofold.hub.variants import tokenizer_files
from twofold.models.registry import FAMILIES
from twofold.text.tokenizer import Tokenizer

from tests.tiny_models.writing import write_tiny_tokenizer

CONFIG, FAST, JINJA, LEGACY = (
    "tokenizer_config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "chat_template.json",
)
BPE: Final = ("vocab.json", "merges.txt")
WITH_CONFIG = (FAST, CONFIG)
WITH_FILE = (FAST, CONFIG, JINJA)
PUBLISHED: dict[str, tuple[str, ...]] = {
    # The template in tokenizer_config.json.
    **dict.fromkeys(
        (
            "mixtral",
            "olmoe",
            "llama",
            "mistral",
            "gemma2",
            "gemma3",
            "deepseek_v2",
            "deepseek_v3",
            "dots1",
            "granitemoe",
        ),
        WITH_CONFIG,
    ),
    **dict.fromkeys(
        ("granitemoe_swa", "flex_olmo", "exaone_moe", "axk1", "axk2", "ernie4_5_vl_moe"), WITH_CONFIG
    ),
    **dict.fromkeys(("aria", "deepseek_ocr2", "dots3_note"), WITH_CONFIG),
    **dict.fromkeys(
        ("qwen3_moe", "qwen2_moe", "qwen2", "qwen3", "qwen3_next", "flint"), (*WITH_CONFIG, *BPE)
    ),
    # A template file.
    **dict.fromkeys(
        ("glm4_moe", "glm4v_moe", "glm_moe_dsa", "glm4_moe_lite", "seed_oss", "solar_open"), WITH_FILE
    ),
    **dict.fromkeys(
        ("hy_v3", "hy_v4", "minimax_m3", "mellum", "hunyuan_v1_dense", "afmoe", "laguna"), WITH_FILE
    ),
    **dict.fromkeys(
        ("minimax_m2", "gpt_oss", "lfm2_moe", "llama4", "mistral4", "mistral_large4", "step3p7", "gemma4"),
        WITH_FILE,
    ),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5", "qwen4_exp", "mimo_v2_flash"), (*WITH_FILE, *BPE)),
    # A template of the processor.
    "gemma3_vision": (FAST, CONFIG, LEGACY, "processor_config.json"),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl"), (FAST, CONFIG, LEGACY, *BPE)),
    # No tokenizer.json.
    "qwen3_omni_moe": (CONFIG, LEGACY, *BPE),
    "kimi_k25": ("tiktoken.model", CONFIG, JINJA),
    "hunyuan_v1_moe": ("hy.tiktoken", CONFIG),
    "ernie4_5_moe": ("tokenizer.model", CONFIG, JINJA),
    # No template.
    "deepseek_v32": (FAST, CONFIG),
}
RANKS = ("tiktoken.model", "hy.tiktoken")
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
HELLO = [{"role": "user", "content": "the cat"}]


def publish(directory: Path, files: tuple[str, ...]) -> None:
    """Write a tiny model's tokenizer in these files."""
    write_tiny_tokenizer(directory, chat_template=TEMPLATE)
    data = json.loads((directory / FAST).read_text())
    config = json.loads((directory / CONFIG).read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}
    added = {str(each["id"]): {k: v for k, v in each.items() if k != "id"} for each in data["added_tokens"]}
    vocabulary = data["model"]["vocab"]
    if JINJA in files or LEGACY in files:
        config.pop("chat_template")
    written = {
        JINJA: TEMPLATE,
        LEGACY: json.dumps({"chat_template": TEMPLATE}),
        "processor_config.json": "{}",
        "vocab.json": json.dumps(vocabulary),
        "merges.txt": "#version: 0.2\n"
        + "\n".join(" ".join(merge) for merge in data["model"]["merges"])
        + "\n",
        **dict.fromkeys(
            RANKS, "".join(f"{base64.b64encode(bytes((byte,))).decode()} {byte}\n" for byte in range(256))
        ),
    }
    if set(RANKS) & set(files):
        added = {
            str(256 + at): {"content": token, "special": True} for at, token in enumerate(added_texts(added))
        }
    (directory / CONFIG).write_text(json.dumps(config | {"added_tokens_decoder": added}))
    for name in files:
        if name in written:
            (directory / name).write_text(written[name])
    if FAST not in files:
        (directory / FAST).unlink()
    if "tokenizer.model" in files:
        write_sentencepiece(directory)


def added_texts(added: dict[str, Any]) -> list[str]:
    return [each["content"] for each in added.values()]


def write_sentencepiece(directory: Path) -> None:
    import sentencepiece

    corpus = directory / "corpus.txt"
    corpus.write_text("the cat sat on the mat\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(directory / "tokenizer"), vocab_size=300, model_type="bpe",
        normalization_rule_name="identity", remove_extra_whitespaces=False, byte_fallback=True, minloglevel=2,
        control_symbols=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], hard_vocab_limit=False,
    )  # fmt: skip


@pytest.mark.parametrize("files", sorted(set(PUBLISHED.values())), ids=lambda files: "+".join(files))
def test_a_published_layout_is_read(tmp_path: Path, files: tuple[str, ...]) -> None:
    publish(tmp_path, files)
    tokenizer = Tokenizer.load(tmp_path)
    prompt = tokenizer.apply_chat_template(HELLO)
    assert prompt == "<|im_start|>the cat<|im_end|>"
    ids = tokenizer.encode(prompt)
    assert tokenizer.decode(ids).strip() == "the cat"
    ends = (tokenizer.token_id("<|im_start|>"), tokenizer.token_id("<|im_end|>"))
    assert (ids[0], ids[-1]) == ends
    assert tokenizer.eos_token_ids == {ends[1]}


def test_every_family_has_its_publishers_files_and_the_hub_chooses_them() -> None:
    assert set(PUBLISHED) == {family.module for family in FAMILIES}
    for files in PUBLISHED.values():
        assert set(tokenizer_files([*files, "README.md", "modeling.py"])) == set(files)
    assert tokenizer_files(["additional_chat_templates/tool_use.jinja"])


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "GPT2Tokenizer"])
def test_vocabulary_and_merges_give_the_ids_of_transformers(tmp_path: Path, kind: str) -> None:
    publish(tmp_path, (CONFIG, *BPE))
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"tokenizer_class": kind}))
    ours = Tokenizer.load(tmp_path)
    theirs = getattr(transformers, kind).from_pretrained(tmp_path)
    byte = "".join(map(chr, range(1, 0x250)))
    for text in (
        "the cat",
        " the  cat\n\nsat",
        "e\u0301 é 12345 don't I'LL",
        "日本 👍🏽 \u2028",
        byte,
        "<|im_end|>the",
    ):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), repr(text)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("vocab.json", '{"a": 0, "b": 2}', "without gaps"),
        ("merges.txt", "#version: 0.2\na b c\n", "line 2"),
        (CONFIG, '{"tokenizer_class": "OddTokenizer"}', "Qwen2Tokenizer"),
        (
            CONFIG,
            '{"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": {"9999": {"content": "<x>"}}}',
            "gaps",
        ),
    ],
)
def test_broken_vocabulary_files_are_refused_by_name(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    publish(tmp_path, (CONFIG, *BPE))
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelLoadError, match=words) as refused:
        Tokenizer.load(tmp_path)
    assert name in str(refused.value)


@pytest.mark.parametrize("place", [LEGACY, "processor_config.json"])
def test_a_template_of_the_processor_is_the_last_choice(tmp_path: Path, place: str) -> None:
    write_tiny_tokenizer(tmp_path, chat_template="tokenizer's")
    (tmp_path / place).write_text(json.dumps({"chat_template": "processor's"}))
    assert Tokenizer.load(tmp_path).apply_chat_template(HELLO) == "tokenizer's"
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, "chat_template": None}))
    assert Tokenizer.load(tmp_path).apply_chat_template(HELLO) == "processor's"


def test_additional_templates(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template="plain")
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("tools")
    (folder / "rag.jinja").write_text("documents")
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert Tokenizer.load(tmp_path).apply_chat_template(HELLO) == "plain"
    # transformers reads the folder beside a template file only.
    (tmp_path / JINJA).write_text("from file")
    ours, theirs = Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for given in (None, tools):
        expected = theirs.apply_chat_template(HELLO, tools=given, tokenize=False)
        assert ours.apply_chat_template(HELLO, tools=given) == expected


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}<|im_start|>{{ m.content }}<x>\n{% endfor %}", "<x>"),
        ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", "<|im_start|>"),
        # The files declare it.
        ("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", None),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_the_template_determines_the_end_of_turn(tmp_path: Path, template: str, end: str | None) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=template)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / FAST))
    backend.add_special_tokens(["<x>"])
    backend.save(str(tmp_path / FAST))
    assert Tokenizer.load(tmp_path).turn_end == end
