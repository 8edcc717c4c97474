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
    "qwen3_5_moe": "qwen35moe", "qwen3_vl_moe": "qwen3vlmoe", "glm4v_moe": "glm4moe", "gemma4": "gemma4",
}  # fmt: skip
"""Families of `tests.tiny_models.pictures` that have projector files: architecture of their text's file."""
_KINDS: Final = {
    "qwen35moe": "qwen3vl_merger",
    "qwen3vlmoe": "qwen3vl_merger",
    "glm4moe": "glm4v",
    "gemma4": "gemma4v",
}
_SIZES: Final = {
    "depth": "block_count", "num_hidden_layers": "block_count", "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length", "num_heads": "attention.head_count",
    "num_attention_heads": "attention.head_count", "patch_size": "patch_size",
}  # fmt: skip
_NAMES: Final = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 128)
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
    pictures = json.loads((model / "preprocessor_config.json").read_text())
    vision, architecture = config["vision_config"], TEXTS[name]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    mixed = architecture == "gemma4"
    (writer.add_clip_vision_projector_type if mixed else writer.add_clip_projector_type)(_KINDS[architecture])
    of_keys = {key: vision[each] for each, key in _SIZES.items() if each in vision}
    of_keys |= {"projection_dim": config["text_config"]["hidden_size"], "image_size": 48}
    of_keys["attention.layer_norm_epsilon"] = float(vision.get("rms_norm_eps", 1e-6))
    if not mixed:
        frames = vision["temporal_patch_size"] if architecture == "glm4moe" else 1
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
    convert = {"gemma4": _of_gemma}.get(architecture, _of_axes)
    for name, tensor in load_file(model / "model.safetensors").items():
        if not name.startswith(("model.language_model.", "lm_head.")):
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
