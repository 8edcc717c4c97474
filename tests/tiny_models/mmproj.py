"""A tiny picture model's GGUF files: its text's header with the tokenizer, and its projector, written with the `gguf`
package and, where it has them, by its names of tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

F32 = npt.NDArray[np.float32]

TEXTS: Final = {
    "qwen3_5_moe": "qwen35moe", "qwen3_5": "qwen35", "qwen3_vl_moe": "qwen3vlmoe", "qwen3_vl": "qwen3vl",
    "glm4v_moe": "glm4moe", "gemma4_e2b": "gemma4", "gemma3": "gemma3", "llama4": "llama4",
    "kimi_k25": "deepseek2",
}  # fmt: skip
"""Families that have projector files: architecture of their text's file."""
_KINDS: Final = {
    "qwen35moe": "qwen3vl_merger", "qwen3vlmoe": "qwen3vl_merger", "qwen35": "qwen3vl_merger",
    "qwen3vl": "qwen3vl_merger", "glm4moe": "glm4v", "gemma4": "gemma4v",
    "gemma3": "gemma3", "llama4": "llama4", "deepseek2": "kimik25",
}  # fmt: skip
_SIZES: Final = {
    "depth": "block_count", "num_hidden_layers": "block_count", "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length", "num_heads": "attention.head_count",
    "num_attention_heads": "attention.head_count", "patch_size": "patch_size",
}  # fmt: skip
_NAMES: Final = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 128)
_TEXT: Final = ("model.language_model.", "language_model.", "lm_head.")
_SUFFIXES: Final = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")


def write_text_header(
    path: Path, model: Path, name: str, *, edit: Callable[[Any], None] | None = None
) -> Path:
    """The text's GGUF file without tensors. edit: changes the metadata through the package's writer."""
    config = json.loads((model / "config.json").read_text())["text_config"]
    writer = gguf.GGUFWriter(path, TEXTS[name])
    writer.add_embedding_length(config["hidden_size"])
    vocabulary = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    added = {each["content"]: each["id"] for each in vocabulary["added_tokens"]}
    ids = vocabulary["model"]["vocab"] | added
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in added else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in vocabulary["model"]["merges"]])
    writer.add_eos_token_id(2)
    if edit is not None:
        edit(writer)
    return _written(writer, path)


def write_projector(path: Path, model: Path, name: str, kind: str = "F32", **settings: Any) -> Path:
    """The projector of a written picture model; its matrices in `kind` where their rows have whole blocks.

    settings: other values of keys of clip.vision, None for a key that is left out.
    """
    config = json.loads((model / "config.json").read_text())
    vision, architecture = config["vision_config"], TEXTS[name]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    mixed = architecture == "gemma4"
    (writer.add_clip_vision_projector_type if mixed else writer.add_clip_projector_type)(_KINDS[architecture])
    of_keys = {key: vision[each] for each, key in _SIZES.items() if each in vision}
    of_keys |= {
        "projection_dim": config["text_config"]["hidden_size"],
        "image_size": vision.get("image_size", 48),
    }
    of_keys["attention.layer_norm_epsilon"] = float(vision.get("rms_norm_eps", vision.get("norm_eps", 1e-6)))
    if "spatial_merge_size" in vision:
        frames = vision["temporal_patch_size"] if architecture == "glm4moe" else 1
        pictures = json.loads((model / "preprocessor_config.json").read_text())
        of_keys["spatial_merge_size"] = vision["spatial_merge_size"]
        of_keys["image_min_pixels"] = pictures["size"]["shortest_edge"] // frames
        of_keys["image_max_pixels"] = pictures["size"]["longest_edge"] // frames
    of_keys |= {"image_mean": [0.25, 0.5, 0.75], "image_std": [0.5, 0.25, 0.5]} | settings
    for key, value in of_keys.items():
        if value is not None:
            add = {
                int: writer.add_uint32,
                float: writer.add_float32,
                list: writer.add_array,
                str: writer.add_string,
            }
            add[type(value)](f"clip.vision.{key}", value)
    for each, values in _tensors(model, architecture, vision):
        _add(writer, each, values, gguf.GGMLQuantizationType[kind])
    return _written(writer, path)


def _add(writer: Any, name: str, values: F32, kind: Any) -> None:
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if values.ndim == 1 or values.shape[-1] % block or "position_embd" in name:
        kind = gguf.GGMLQuantizationType.F32
    if kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, np.ascontiguousarray(values))
    else:
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)


def _tensors(model: Path, architecture: str, vision: Mapping[str, Any]) -> Iterator[tuple[str, F32]]:
    converters = {"gemma4": _of_gemma, "gemma3": _of_gemma3, "llama4": _of_llama4, "deepseek2": _of_kimi}
    convert = converters.get(architecture, _of_axes)
    for name, tensor in load_file(model / "model.safetensors").items():
        if not name.startswith(_TEXT):
            yield from convert(name, tensor.float().numpy(), vision)


def _of_axes(name: str, values: F32, vision: Mapping[str, Any]) -> Iterator[tuple[str, F32]]:
    """Qwen3-VL and GLM-4V."""
    name = name.removeprefix("model.")
    base, _, suffix = name.rpartition(".")
    tensors, names = gguf.MODEL_TENSOR, gguf.TENSOR_NAMES
    if name == "visual.patch_embed.proj.weight":
        for frame, end in ((0, ""), (1, ".1")):
            yield f"{names[tensors.V_ENC_EMBD_PATCH]}.weight{end}", values[:, :, frame]
    elif base.startswith("visual.deepstack_merger_list."):
        number, part = base.split(".")[2:]
        kind = {"norm": tensors.V_DS_NORM, "linear_fc1": tensors.V_DS_FC1, "linear_fc2": tensors.V_DS_FC2}[
            part
        ]
        yield f"{names[kind].format(bid=vision['deepstack_visual_indexes'][int(number)])}.{suffix}", values
    elif base in ("visual.merger.linear_fc1", "visual.merger.linear_fc2"):
        yield f"{names[tensors.V_MMPROJ].format(bid=0 if base.endswith('1') else 2)}.{suffix}", values
    elif base == "visual.merger.norm":
        yield f"{names[tensors.V_POST_NORM]}.{suffix}", values
    else:
        yield _named(name), values


def _of_gemma(name: str, values: F32, vision: Mapping[str, Any]) -> Iterator[tuple[str, F32]]:
    if name.endswith("patch_embedder.input_proj.weight"):
        side = vision["patch_size"]
        values = values.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
    if name.endswith("position_embedding_table"):
        name += ".weight"
    name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(
        ".linear.weight", ".weight"
    )
    yield _named(name), np.atleast_1d(values)


def _of_gemma3(name: str, values: F32, vision: Mapping[str, Any]) -> Iterator[tuple[str, F32]]:
    if not name.startswith("vision_tower.head."):
        name = name.replace("vision_tower.", "vision_tower.vision_model.").replace("_weight", ".weight")
        yield _named(name), values + 1 if "soft_emb_norm" in name else values


def _of_llama4(name: str, values: F32, vision: Mapping[str, Any]) -> Iterator[tuple[str, F32]]:
    if name == "multi_modal_projector.linear_1.weight":
        yield f"{gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.V_MMPROJ_FC]}.weight", values
    else:
        yield _named(f"{name}.weight" if name.endswith("positional_embedding_vlm") else name), values


def _of_kimi(name: str, values: F32, vision: Mapping[str, Any]) -> Iterator[tuple[str, F32]]:
    """Queries and keys: a head's pairs turn by rows and columns in turn, there by one axis after the other."""
    if ".wqkv." in name:
        parts = values.reshape(3, vision["num_attention_heads"], -1, 2, 2, *values.shape[1:])
        by_axis = np.moveaxis(parts[:2], 3, 2)
        values = np.concatenate([by_axis.reshape(2, -1), parts[2:].reshape(1, -1)]).reshape(values.shape)
    name = name.replace("model.mm_projector.", "mm_projector.").replace("encoder.patch_embed", "patch_embed")
    for number, theirs in (("0", "linear_1"), ("2", "linear_2")):
        name = name.replace(f"proj.{number}.", f"proj.{theirs}.")
    yield _named(name), values


def _named(name: str) -> str:
    found = _NAMES.get_name(name, try_suffixes=_SUFFIXES)
    assert found is not None, name
    return found


def _written(writer: Any, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
