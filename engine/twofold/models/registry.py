"""Registry of model families: one entry each, whose module is imported on first use.

A family's module defines

    def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig    of config.json
    def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]     a GGUF file's header in config.json's format

The second is missing from families whose GGUF files another family reads.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol, cast

from twofold.api.errors import ModelLoadError
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.config_json import architecture_name, read_config_json, read_generation_defaults
from twofold.models.decoder_family import DecoderFamily
from twofold.models.families.decoders import DECODERS
from twofold.models.gguf_config import GgufMetadata
from twofold.models.unsupported import refusal
from twofold.text.chat.marks import ChatMarks, FamilyChat
from twofold.weights.gguf_file import GgufFile, is_gguf
from twofold.weights.json_file import Fields

_NO_CHAT: Final = FamilyChat()
_PILLOW: Final = "pillow"
_TORCHVISION: Final = "torchvision"


@dataclass(frozen=True)
class Family:
    """Names of a family: Hugging Face's classes, and GGUF's general.architecture (of several, the first reads it)."""

    module: str
    """A key of `families.decoders.DECODERS`, or a module of `families`."""
    classes: tuple[str, ...]
    gguf: str
    chat: FamilyChat = _NO_CHAT
    """Markup of tool calls and reasoning in its models' output."""
    pictures: str = ""
    """Package with which transformers scales pictures for its encoder; "": it reads text alone."""


_QWEN3: Final = FamilyChat(("qwen3_coder", "hermes"), ("qwen3",))
_GLM: Final = FamilyChat(("glm47", "glm45"), ("glm45",), ("<|user|>", "<|observation|>"))
_HUNYUAN: Final = FamilyChat(("hunyuan_a13b",), ("hunyuan_a13b",))
_HY: Final = FamilyChat(("hy_v3", "hy_v3_preview"), ("hy_v3", "hy_v3_preview"))
_XML: Final = FamilyChat(("qwen3_coder", "hermes"), ("deepseek_r1",))
_KIMI: Final = FamilyChat(("kimi_k2",), ("kimi_k2",), ("<|im_end|>",))
# GGUF files also call Kimi-K2 and GLM-4.7-Flash "deepseek2", and Kimi-K2's own files name DeepSeek-V3.
_DEEPSEEK: Final = FamilyChat(
    ("deepseek_v32", "deepseek_v3", "deepseek_v31", *_KIMI.tools, *_GLM.tools),
    ("deepseek_r1",),
    (*_KIMI.end_of_turn, *_GLM.end_of_turn),
)

FAMILIES: Final = (
    Family("qwen3_moe", ("Qwen3MoeForCausalLM",), "qwen3moe", _QWEN3),
    Family("mixtral", ("MixtralForCausalLM",), "llama", FamilyChat(("mistral", "hermes"))),
    Family("qwen2_moe", ("Qwen2MoeForCausalLM",), "qwen2moe", FamilyChat(("hermes",))),
    Family("qwen3_next", ("Qwen3NextForCausalLM",), "qwen3next", _QWEN3),
    Family(
        "qwen3_5_moe",
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        "qwen35moe",
        _QWEN3,
        _PILLOW,
    ),
    Family("qwen3_5", ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), "qwen35", _QWEN3, _PILLOW),
    Family(
        "qwen4_exp", ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"), "qwen4exp", _QWEN3, _PILLOW
    ),
    Family("olmoe", ("OlmoeForCausalLM",), "olmoe"),
    Family("glm4_moe", ("Glm4MoeForCausalLM",), "glm4moe", _GLM),
    Family("dots1", ("Dots1ForCausalLM",), "dots1", FamilyChat(end_of_turn=("<|endofresponse|>",))),
    Family(
        "llama",
        ("LlamaForCausalLM",),
        "",
        FamilyChat(("llama4_json", "hermes"), ("deepseek_r1",), ("<|eot_id|>", "<|eom_id|>")),
    ),
    Family("mistral", ("MistralForCausalLM",), "", FamilyChat(("mistral", "hermes"))),
    Family("qwen2", ("Qwen2ForCausalLM",), "qwen2", FamilyChat(("hermes",), ("deepseek_r1",))),
    Family("qwen3", ("Qwen3ForCausalLM",), "qwen3", _QWEN3),
    Family("seed_oss", ("SeedOssForCausalLM",), "seed_oss", FamilyChat(("seed_oss",), ("seed_oss",))),
    Family("gemma2", ("Gemma2ForCausalLM",), ""),
    Family("gemma3", ("Gemma3ForCausalLM",), "gemma3"),
    Family("gemma3_vision", ("Gemma3ForConditionalGeneration",), "", pictures=_PILLOW),
    Family(
        "solar_open",
        ("SolarOpenForCausalLM",),
        "",
        FamilyChat(("solar_open",), ("solar_open", "deepseek_r1"), ("<|flush|>", "<|calls|>")),
    ),
    Family("hy_v3", ("HYV3ForCausalLM",), "hy_v3", _HY),
    Family("mellum", ("MellumForCausalLM",), "mellum", _QWEN3),
    Family("qwen3_vl_moe", ("Qwen3VLMoeForConditionalGeneration",), "qwen3vlmoe", _QWEN3, _PILLOW),
    Family("qwen3_vl", ("Qwen3VLForConditionalGeneration",), "qwen3vl", _QWEN3, _PILLOW),
    Family("glm4v_moe", ("Glm4vMoeForConditionalGeneration",), "", _GLM, _PILLOW),
    Family(
        "qwen3_omni_moe",
        ("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"),
        "",
        _QWEN3,
    ),
    Family("hunyuan_v1_moe", ("HunYuanMoEV1ForCausalLM",), "hunyuan-moe", _HUNYUAN),
    Family("hunyuan_v1_dense", ("HunYuanDenseV1ForCausalLM",), "hunyuan-dense", _HUNYUAN),
    Family("mimo_v2_flash", ("MiMoV2FlashForCausalLM",), "mimo2", _QWEN3),
    Family("afmoe", ("AfmoeForCausalLM",), "afmoe", _XML),
    Family(
        "laguna", ("LagunaForCausalLM",), "laguna", FamilyChat(("glm47", "glm45", "hermes"), ("deepseek_r1",))
    ),
    Family(
        "ernie4_5_vl_moe",
        ("Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VL_MoeForConditionalGeneration"),
        "",
        FamilyChat(("hermes",), ("ernie45",)),
        _PILLOW,
    ),
    Family("aria", ("AriaTextForCausalLM", "AriaForConditionalGeneration"), ""),
    Family("deepseek_ocr2", ("DeepseekOcr2ForConditionalGeneration",), "deepseek2-ocr"),
    Family("flex_olmo", ("FlexOlmoForCausalLM",), ""),
    Family("exaone_moe", ("ExaoneMoeForCausalLM",), "exaone-moe", FamilyChat(("hermes",), ("deepseek_r1",))),
    Family("flint", ("FlintForCausalLM",), "", _QWEN3),
    Family(
        "minimax_m2", ("MiniMaxM2ForCausalLM",), "minimax-m2", FamilyChat(("minimax_m2",), ("minimax_m2",))
    ),
    Family(
        "minimax_m3",
        ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForCausalLM"),
        "minimax-m3",
        FamilyChat(("minimax_m2",), ("minimax_m2",)),
    ),
    Family(
        "ernie4_5_moe", ("Ernie4_5_MoeForCausalLM",), "ernie4_5-moe", FamilyChat(("hermes",), ("ernie45",))
    ),
    Family(
        "granitemoe",
        ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
        "granitemoe",
        FamilyChat(("granite", "hermes"), ("granite",)),
    ),
    Family(
        "granitemoe_swa",
        ("GraniteMoeSWAForCausalLM",),
        "granite_swa",
        FamilyChat(("granite", "hermes"), ("granite",)),
    ),
    Family(
        "gpt_oss",
        ("GptOssForCausalLM",),
        "gpt-oss",
        FamilyChat(("openai",), ("openai_gptoss",), ("<|return|>", "<|call|>")),
    ),
    Family("lfm2_moe", ("Lfm2MoeForCausalLM",), "lfm2moe", FamilyChat(("lfm2",), ("deepseek_r1",))),
    Family(
        "llama4",
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        "llama4",
        FamilyChat(("llama4_pythonic", "llama4_json"), (), ("<|eot|>", "<|eom|>")),
        _TORCHVISION,
    ),
    Family("deepseek_v3", ("DeepseekV3ForCausalLM",), "deepseek2", _DEEPSEEK),
    Family("deepseek_v2", ("DeepseekV2ForCausalLM",), "", _DEEPSEEK),
    Family("deepseek_v32", ("DeepseekV32ForCausalLM",), "deepseek32", _DEEPSEEK),
    Family(
        "dots3_note",
        ("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration"),
        "dots3note",
        FamilyChat(end_of_turn=("<|endofresponse|>",)),
    ),
    Family("glm_moe_dsa", ("GlmMoeDsaForCausalLM",), "glm-dsa", _GLM),
    Family("hy_v4", ("HYV4ForCausalLM",), "hy_v4", _HY),
    Family("axk1", ("AXK1ForCausalLM",), "", FamilyChat(("hermes",), ("deepseek_r1",))),
    Family("axk2", ("AXK2ForCausalLM",), "", FamilyChat(("hermes",), ("deepseek_r1",))),
    Family(
        "mistral_large4",
        ("MistralLarge4ForConditionalGeneration",),
        "",
        FamilyChat(("mistral",), ("mistral",)),
        _TORCHVISION,
    ),
    Family(
        "mistral4",
        ("Mistral4ForCausalLM", "Mistral3ForConditionalGeneration"),
        "mistral4",
        FamilyChat(("mistral",), ("mistral",)),
        _TORCHVISION,
    ),
    Family(
        "step3p7", ("Step3p7ForConditionalGeneration", "Step3p5ForCausalLM"), "step35", _XML, _TORCHVISION
    ),
    Family("glm4_moe_lite", ("Glm4MoeLiteForCausalLM",), "deepseek2", _GLM),
    Family(
        "kimi_k25",
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        "deepseek2",
        _KIMI,
        _TORCHVISION,
    ),
    Family(
        "gemma4",
        ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        "gemma4",
        FamilyChat(("gemma4",), ("gemma4",), ("<turn|>",)),
        _PILLOW,
    ),
)
ARCHITECTURES: Final = tuple(sorted(name for family in FAMILIES for name in family.classes))


class FamilyModule(Protocol):
    """Interface of a family's module."""

    def parse_config(self, fields: Fields, generation: GenerationDefaults) -> ModelConfig: ...

    def gguf_settings(self, metadata: GgufMetadata) -> dict[str, Any]: ...


def family_of(
    architecture: str, *, where: str = "architectures", config: Mapping[str, Any] = MappingProxyType({})
) -> FamilyModule:
    """The family of a class name. Raises ModelLoadError: `where` names the file, `config` says what it needs."""
    for family in FAMILIES:
        if _with_head(architecture) in family.classes:
            return module_of(family)
    raise ModelLoadError(f"{where}: architecture {architecture!r} {refusal(architecture, config)}")


def family_named(name: str) -> Family | None:
    """The family of this module, class or GGUF architecture; None: there is none."""
    return next((each for each in FAMILIES if name in (each.module, *each.classes, each.gguf) and name), None)


def _with_head(architecture: str) -> str:
    """The class with a head of a decoder's class with a classifier or without either; any other class itself."""
    for suffix in ("ForSequenceClassification", "Model"):
        if architecture.endswith(suffix):
            return architecture.removesuffix(suffix) + "ForCausalLM"
    return architecture


def read_config(path: str | Path) -> ModelConfig:
    """The validated configuration of a model directory or GGUF file. Reads no weights. Raises ModelLoadError."""
    if is_gguf(path):
        return read_gguf_config(GgufFile.open(path))
    directory = Path(path)
    fields = read_config_json(directory)
    family = family_of(architecture_name(fields), where=fields.where, config=fields.data)
    return family.parse_config(fields, read_generation_defaults(directory)).validate(fields.where)


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """The validated configuration of an opened GGUF file."""
    family, fields, metadata = _read_gguf(file)
    config = family.parse_config(fields, metadata.generation_defaults())
    return metadata.with_frequency_factors(config).validate(str(file.path))


def gguf_as_config_json(file: GgufFile) -> dict[str, Any]:
    """A GGUF file's settings as config.json would have them. Raises ModelLoadError as `read_gguf_config`."""
    return _read_gguf(file)[1].data


def _read_gguf(file: GgufFile) -> tuple[FamilyModule, Fields, GgufMetadata]:
    name = file.fields.get("general.architecture")
    for known in FAMILIES:
        if name == known.gguf:
            metadata = GgufMetadata(file)
            settings = {"architectures": [known.classes[0]]} | module_of(known).gguf_settings(metadata)
            family = family_of(settings["architectures"][0])
            return family, metadata.config_json(settings), metadata
    own = {key.removeprefix(f"{name}."): value for key, value in file.fields.items()}
    raise ModelLoadError(f"{file.path}: general.architecture is {name!r}, which {refusal(str(name), own)}")


def chat_marks(architecture: str, template: str | None) -> ChatMarks:
    """Tool-call and reasoning markup of a model of this class with this chat template. Unknown class: none."""
    architecture = _with_head(architecture)
    chat = next((family.chat for family in FAMILIES if architecture in family.classes), _NO_CHAT)
    return chat.marks_of(template)


def describe_family(family: Family) -> str:
    """A family's models and architecture, from its summary or the first line of its module, and its pictures."""
    module = module_of(family)
    summary = (module.__doc__ or "").partition("\n")[0]
    if isinstance(module, DecoderFamily):
        summary = module.decoder.summary
    needs = f", with {family.pictures} installed" if family.pictures == _TORCHVISION else ""
    return f"{summary} Reads pictures{needs}." if family.pictures else summary


def module_of(family: Family) -> FamilyModule:
    """The family's description, imported on first use."""
    if family.module in DECODERS:
        return DECODERS[family.module]
    return cast(FamilyModule, importlib.import_module(f"twofold.models.families.{family.module}"))
