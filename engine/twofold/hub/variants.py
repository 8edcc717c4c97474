"""The files of a repository that a model needs: one set of safetensors files, or the parts of one GGUF file.

Files are chosen by name alone. Python files, pickles and every other kind are never chosen, so no remote code is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from twofold.api.errors import ModelLoadError
from twofold.api.projector_names import is_projector, preferred_projector
from twofold.hub.reference import HubModel

INDEX: Final = "model.safetensors.index.json"
_TEXT_FILES: Final = frozenset((
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "tiktoken.model",
    "hy.tiktoken", "tekken.json",
    "chat_template.jinja", "chat_template.json", "processor_config.json",
    "additional_chat_templates/tool_use.jinja", "hf_quant_config.json", INDEX,
))  # fmt: skip
USUAL_QUANT: Final = "Q4_K_M"
_GGUF_PART: Final = re.compile(
    r"(?P<stem>.+?)(?:-(?P<number>\d{5})-of-(?P<count>\d{5}))?\.gguf", re.IGNORECASE
)
_QUANT: Final = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|FP16|MXFP4\w*|NVFP4\w*))(?=$|[-./])",
    re.IGNORECASE,
)
_SHOWN: Final = 12


@dataclass(frozen=True)
class Variant:
    """One model of a repository."""

    quant: str
    """GGUF quantisation, or "safetensors"."""
    files: tuple[str, ...]
    """Names in the repository, small files first."""
    entry: str
    """The file to open, relative to the repository; "" for the directory."""
    projector: str = ""
    """File of the picture encoder, which all variants of a folder share; "": none."""

    @property
    def downloads(self) -> tuple[str, ...]:
        """What to fetch. The projector comes first: a model that is complete has it."""
        return (*filter(None, [self.projector]), *self.files)


def gguf_variants(names: Iterable[str]) -> list[Variant]:
    """Complete GGUF models among `names` with their projectors, without importance matrices."""
    names = sorted(names)
    parts: dict[str, list[tuple[str, int]]] = {}
    for name in names:
        match = _GGUF_PART.fullmatch(name)
        last = name.rpartition("/")[2]
        if match is None or is_projector(last) or "imatrix" in last.lower():
            continue
        parts.setdefault(match["stem"], []).append((name, int(match["count"] or 1)))
    return [
        Variant(
            quant_of(stem), tuple(name for name, _ in files), files[0][0], _projector_of(files[0][0], names)
        )
        for stem, files in parts.items()
        if all(count == len(files) for _, count in files)
    ]


def _projector_of(entry: str, names: Sequence[str]) -> str:
    """The projector in a model's folder, or else at the top of the repository; "" if there is none."""
    for folder in (entry[: entry.rfind("/") + 1], ""):
        inside = [name.removeprefix(folder) for name in names if name.startswith(folder)]
        if (found := preferred_projector(inside)) is not None:
            return folder + found
    return ""


def quant_of(stem: str) -> str:
    """The quantisation in a GGUF file's name, in capitals; the name itself if there is none."""
    found = _QUANT.findall(stem)
    return found[-1].upper() if found else stem.rpartition("/")[2]


def safetensors_variant(names: Iterable[str]) -> Variant | None:
    """The model in Hugging Face layout at the top of the repository; None without one."""
    names = frozenset(names)
    top = sorted(name for name in names if "/" not in name)
    weights = [name for name in top if name.endswith(".safetensors") and not name.startswith("adapter")]
    usual = [name for name in weights if name.startswith("model")]
    if not weights or "config.json" not in top:
        return None
    return Variant("safetensors", (*sorted(_TEXT_FILES.intersection(names)), *(usual or weights)), "")


def choose_variant(model: HubModel, names: Sequence[str]) -> Variant:
    """The variant that `model` names. ModelLoadError lists what the repository has instead."""
    ggufs, plain = gguf_variants(names), safetensors_variant(names)
    wanted = model.quant.upper() if model.quant else None
    if wanted is None and plain is not None:
        return plain
    if not ggufs and plain is None:
        kinds = sorted({name.rpartition(".")[2] for name in names if "." in name})
        raise ModelLoadError(
            f"{model.repo}: expected safetensors weights with a config.json, or GGUF files; the repository has "
            f"files of {', '.join(kinds) or 'no kind'}; name a repository that was converted to either"
        )
    if not ggufs:
        raise ModelLoadError(
            f"{model}: the repository has safetensors weights and no GGUF file; give {model.repo}, and convert it with "
            "twofold quantize"
        )
    found = _matching(ggufs, wanted or USUAL_QUANT)
    if wanted is None and len(ggufs) == 1:
        found = ggufs
    if len(found) != 1:
        problem = f"{len(found)} models of that name" if found else f"no {wanted or USUAL_QUANT}"
        raise ModelLoadError(
            f"{model}: the repository has {problem}; give {model.repo}:NAME with {_listed(ggufs)}"
        )
    return found[0]


def _matching(variants: Sequence[Variant], wanted: str) -> list[Variant]:
    exact = [v for v in variants if wanted in (v.quant, v.entry.upper())]
    return exact or [v for v in variants if v.quant == f"UD-{wanted}"]


def _listed(variants: Sequence[Variant]) -> str:
    by_quant: dict[str, list[Variant]] = {}
    for variant in variants:
        by_quant.setdefault(variant.quant, []).append(variant)
    names = [
        name for quant, each in by_quant.items() for name in ([quant] if len(each) == 1 else _entries(each))
    ]
    more = f" or {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"one of {', '.join(sorted(names)[:_SHOWN])}{more}"


def _entries(variants: Sequence[Variant]) -> list[str]:
    return [variant.entry for variant in variants]


def tokenizer_files(names: Iterable[str]) -> tuple[str, ...]:
    """Configuration, tokenizer and chat template, without weights."""
    return tuple(sorted(name for name in names if name in _TEXT_FILES and name != INDEX))
