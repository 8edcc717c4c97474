"""How a model's files pool hidden states: those of sentence-transformers, config.json, or a GGUF file's header.

sentence-transformers lists the modules after the transformer in modules.json; Pooling has a configuration in its own
folder, Normalize has none.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

from twofold.api.errors import ModelLoadError
from twofold.api.pooling import INSTRUCTION, QWEN_PAIR, ModelPooling, PoolerConfig, PoolingKind
from twofold.models.config import ModelConfig
from twofold.models.model_files import MODULES, ModelFiles
from twofold.weights.gguf_file import GgufFile, is_gguf, model_name
from twofold.weights.json_file import Fields, read_json_list, read_json_object

_PROMPTS: Final = "config_sentence_transformers.json"
_KINDS: Final[dict[str, PoolingKind]] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_FLAGS: Final = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Keys of older Pooling configurations, and their names in newer ones."""
_GGUF_KINDS: Final[dict[int, PoolingKind]] = {1: "mean", 2: "cls", 3: "last", 4: "last"}
"""llama.cpp's numbers; 0 is none, 4 a classifier, which reads the last token."""
_PAIR_PROMPT: Final = "pair_prompt"
"""Key of config.json in models made from GGUF files."""
_RERANKER: Final = ("no", "yes")
"""The tokens whose logits Qwen3-Reranker compares; its files do not name them."""


def read_pooling(path: Path, files: ModelFiles, given: PoolerConfig) -> ModelPooling:
    """How the model of these opened files pools, as far as `given` does not say otherwise. ModelLoadError for damaged
    files."""
    if is_gguf(path):
        found = _of_gguf(GgufFile.open(path))
    elif path.is_dir():
        found = _of_directory(path)
    else:
        found = ModelPooling()
    is_reranker = (
        files.config.architecture.startswith("Qwen3") and "reranker" in model_name(str(path)).lower()
    )
    num_labels = files.config.head.labels
    if is_reranker and found.classifier is None:
        found = replace(found, classifier=_RERANKER)
    if num_labels:
        prompt = _pair_prompt(path) or (QWEN_PAIR if is_reranker else "")
        labels = _ranking(_label_names(path), num_labels)
        found = replace(found, classifier=None, num_labels=num_labels, labels=labels, pair_prompt=prompt)
    if given.kind is not None:
        found = replace(found, kind=given.kind, origin="--pooler-config")
    return replace(
        found,
        normalise=found.normalise if given.normalise is None else given.normalise,
        is_matryoshka=found.is_matryoshka if given.is_matryoshka is None else given.is_matryoshka,
        dimensions=given.dimensions or found.dimensions,
        classifier=given.classifier or found.classifier,
        size=files.config.hidden_size,
        prompts=_prompts(path),
        generates=files.config.has_head,
    )


def _ranking(names: list[str], num_labels: int) -> tuple[int, ...]:
    """See `ModelPooling.labels`: of two labels the one named yes is the relevant one, else the second."""
    if num_labels > 2:
        return ()
    relevant = names.index("yes") if "yes" in names else num_labels - 1
    return (1 - relevant, relevant) if num_labels == 2 else (0,)


def _label_names(path: Path) -> list[str]:
    """Names of the classifier's labels; empty if the files have none, llama.cpp's if a GGUF file has none."""
    if is_gguf(path):
        fields = GgufFile.open(path).fields
        names = fields.get(f"{fields.get('general.architecture')}.classifier.output_labels")
        return ["yes", "no"] if names is None else [str(name).lower() for name in names]
    names = read_json_object(path / "config.json", "the model's configuration").get("id2label")
    return [str(name).lower() for name in names.values()] if isinstance(names, dict) else []


def _pair_prompt(path: Path) -> str:
    """The prompt of a pair, of a GGUF file's header or of a model made from one; "" if there is none."""
    if is_gguf(path):
        template = GgufFile.open(path).fields.get("tokenizer.chat_template.rerank")
    else:
        template = read_json_object(path / "config.json", "the model's configuration").get(_PAIR_PROMPT)
    if not isinstance(template, str) or not all(place in template for place in ("{query}", "{document}")):
        return ""
    return template.replace(INSTRUCTION, "{instruction}")


def classifier_settings(path: Path, config: ModelConfig) -> dict[str, Any]:
    """Settings of config.json for the classifier of this GGUF file; empty if it has none."""
    if not config.head.labels:
        return {}
    name = config.architecture.replace("ForCausalLM", "ForSequenceClassification")
    names = {str(n): label for n, label in enumerate(_label_names(path)[: config.head.labels])}
    return {"architectures": [name], "id2label": names, _PAIR_PROMPT: _pair_prompt(path)}


def _prompts(path: Path) -> dict[str, str]:
    """The named texts that sentence-transformers puts before inputs; empty if the model has none."""
    file = path / _PROMPTS
    if not path.is_dir() or not file.is_file():
        return {}
    prompts = read_json_object(file, "the model's prompts").get("prompts")
    if not isinstance(prompts, dict):
        return {}
    return {name: text for name, text in prompts.items() if isinstance(text, str)}


def _of_gguf(file: GgufFile) -> ModelPooling:
    key = f"{file.fields.get('general.architecture')}.pooling_type"
    kind = _GGUF_KINDS.get(file.fields.get(key) or 0)
    return ModelPooling() if kind is None else ModelPooling(kind, origin=key)


def _of_directory(directory: Path) -> ModelPooling:
    config = Fields(
        str(directory / "config.json"),
        read_json_object(directory / "config.json", "the model's configuration"),
    )
    pair = config.data.get("classifier_from_token")
    if pair is not None and not _is_pair(pair):
        raise config.error("classifier_from_token", pair, 'two tokens such as ["no", "yes"]')
    dimensions = config.integers("matryoshka_dimensions", minimum=1)
    found = ModelPooling(
        is_matryoshka=config.boolean("is_matryoshka", False) or bool(dimensions),
        dimensions=dimensions,
        classifier=None if pair is None else (pair[0], pair[1]),
        refusal=_refusal(config.data),
    )
    modules = directory / MODULES
    return _of_modules(directory, found) if modules.is_file() else found


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)


def _refusal(config: dict[str, Any]) -> str:
    for key, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        if config.get(key) is value:
            return f"config.json has {key}: {str(value).lower()}; only causal attention is computed"
    return ""


def _of_modules(directory: Path, found: ModelPooling) -> ModelPooling:
    """`found` with what modules.json and the configuration of its Pooling module say."""
    modules = read_json_list(directory / MODULES, "the model's modules")
    types = {}
    for module in modules:
        if not isinstance(module, dict) or not all(
            isinstance(module.get(key), str) for key in ("type", "path")
        ):
            raise ModelLoadError(
                f"{directory / MODULES}: a module is {module!r}, expected an object with type and path; fix or replace "
                "this file"
            )
        types[str(module["type"]).rpartition(".")[2]] = module["path"]
    found = replace(found, normalise="Normalize" in types)
    if "Dense" in types:
        found = replace(found, refusal=f"{MODULES} has a Dense module after pooling, which is not computed")
    folder = types.get("Pooling")
    if folder is None or ".." in PurePosixPath(folder).parts or not (directory / folder).is_dir():
        return found
    file = directory / folder / "config.json"
    mode = _mode(Fields(str(file), read_json_object(file, "the model's pooling")))
    if mode not in _KINDS:
        return replace(
            found, refusal=f"{folder}/config.json has pooling mode {mode!r}, which is not computed"
        )
    return replace(found, kind=_KINDS[mode], origin=f"{folder}/config.json")


def _mode(fields: Fields) -> str:
    named = fields.data.get("pooling_mode")
    if named is not None:
        return str(named)
    return "+".join(name for key, name in _FLAGS.items() if fields.boolean(key, False)) or "none"
