"""Configuration and tokenizer of a model written from another one (quantised, packed).

Files of a directory are copied. A GGUF file has neither configuration nor tokenizer files: its configuration is written
in Hugging Face's format, and its tokenizer as tokenizer.json.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, Final

from twofold.api.errors import ConfigError, ModelLoadError
from twofold.models.config import ModelConfig
from twofold.models.model_files import MODULES, ModelFiles
from twofold.models.picture_encoder import write_vision_file
from twofold.models.pooling import classifier_settings
from twofold.models.registry import gguf_as_config_json
from twofold.text.tokenizer import Tokenizer
from twofold.weights.gguf_file import GgufFile, is_gguf
from twofold.weights.json_file import read_json_object

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "hy.tiktoken",
    "tekken.json",
    "LICENSE",
)
POOLING_FILES: Final = (MODULES, "1_Pooling/config.json", "config_sentence_transformers.json")
"""How an embedding model pools, in sentence-transformers' format."""


def fingerprint(files: ModelFiles, target: str) -> str:
    """Digest of a source model and the conversion target; changes with any file or tensor of the source."""
    digest = hashlib.sha256(f"1 {target}".encode())
    seen: set[Path] = set()
    for name in sorted(files.tensors):
        entry = files.tensors.entry(name)
        digest.update(f"{name} {entry.dtype} {entry.shape} {entry.offset} {entry.num_bytes}\n".encode())
        if entry.file not in seen:
            seen.add(entry.file)
            status = entry.file.stat()
            digest.update(f"{entry.file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def check_room(directory: Path, needed: int) -> None:
    """Raise ConfigError if the disk of `directory` has less than `needed` bytes free."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise ConfigError(
            f"{directory}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free; free some or choose another "
            "directory"
        )


def source_config(source: Path, config: ModelConfig) -> dict[str, Any]:
    """The source's config.json without its quantisation. Raises ModelLoadError for settings it cannot express."""
    if is_gguf(source):
        return _as_config_json(source, config)
    data = read_json_object(source / "config.json", "the model's configuration")
    for section in (data, data.get("text_config")):
        if isinstance(section, dict):
            section.pop("quantization_config", None)
            section.pop("compression_config", None)
    return data


def write_tokenizer(source: Path, output: Path, config: ModelConfig) -> None:
    """Copy or write all files that `Tokenizer.load` reads, the recommended sampling, and the picture encoder."""
    write_vision_file(config, source, output)
    if is_gguf(source):
        Tokenizer.open(source).save(output)
        given = {
            name: value for name, value in vars(config.generation).items() if value not in (None, (), False)
        }
        (output / "generation_config.json").write_text(json.dumps(given, indent=2) + "\n", encoding="utf-8")
        return
    for name in (*TOKENIZER_FILES, *POOLING_FILES):
        if (source / name).is_file():
            (output / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, output / name)


def _as_config_json(source: Path, config: ModelConfig) -> dict[str, Any]:
    if config.rope.frequency_factors:
        raise ModelLoadError(
            f"{source}: its rope_freqs.weight has no place in config.json; give the Hugging Face checkpoint instead"
        )
    end = sorted(Tokenizer.open(source).eos_token_ids)
    made = gguf_as_config_json(GgufFile.open(source)) | {"eos_token_id": end, "dtype": config.dtype}
    return made | classifier_settings(source, config)
