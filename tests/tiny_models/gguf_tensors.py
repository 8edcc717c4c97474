"""A tiny model's tensors as llama.cpp's converters write them: names by its blocks, values by what converters do."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping

import numpy as np
from twofold.blocks.block import ModelPart
from twofold.blocks.experts import PARTS, RoutedExperts
from twofold.blocks.gated_delta import GatedDelta
from twofold.blocks.mla import Mla
from twofold.weights.tensor_spec import TensorSpec

from tests.tiny_models.family import TinyFamily, parsed, parts_of
from tests.tiny_models.writing import F32, TinyModel


def tiny_gguf_weights(
    model: TinyModel, *, one_tensor_per_expert: bool = False, split_kv: bool = True
) -> dict[str, F32]:
    """Weights of `model` under GGUF's names and in its order of rows.

    one_tensor_per_expert: as old files of Mixtral. split_kv: latent attention's kv_b by its use, as newer files.
    """
    is_family = isinstance(model, TinyFamily)
    own = model.own_weights() if is_family else model.weights()
    config = model.parsed if is_family else parsed(json.dumps(model.config()))
    stored = model.row.gguf_stored if is_family else ()

    def has_file(spec: TensorSpec) -> bool:
        known = ("attn_k_b.", *stored) if split_kv else stored
        return ("_exps." in spec.gguf and "gate_up" not in spec.gguf) or any(
            part in spec.gguf for part in known
        )

    found: dict[str, F32] = {}
    for part in parts_of(config, predicting=model.num_gguf_layers > model.num_layers):
        if isinstance(part, RoutedExperts):
            experts = stacks(part, {r: own[s.name] for r, s in part.tensors(model.is_stored).items()})
            names = {role: spec.gguf for role, spec in part.tensors(has_file).items()}
            for role, values in experts.items():
                if one_tensor_per_expert:
                    of_one = {
                        f"blk.{part.layer}.ffn_{role}.{n}.weight": each for n, each in enumerate(values)
                    }
                    found |= of_one
                else:
                    found[names[role]] = values
            continue
        values = {role: own[spec.name] for role, spec in part.tensors(model.is_stored).items()}
        values = _converted(model, part, values)
        for role, spec in part.tensors(has_file).items():
            _add(found, spec, values[role])
    return found | _factors(model)


def stacks(block: RoutedExperts, values: Mapping[str, F32]) -> dict[str, F32]:
    """Experts of any layout as stacks of gate, up and down [experts, rows, columns], and their biases."""
    if "gate.0" in values:
        numbers = range(block.num_experts)
        return {part: np.stack([values[f"{part}.{n}"] for n in numbers]) for part in PARTS}
    found: dict[str, F32] = {}
    inner, hidden = block.intermediate_size, block.hidden_size
    for role, each in values.items():
        rows = (
            each
            if each.ndim == 2 or each.shape[2] == (inner if role == "down" else hidden)
            else each.swapaxes(1, 2)
        )
        if not role.startswith("gate_up"):
            found[role] = np.ascontiguousarray(rows)
            continue
        halves = (rows[:, 0::2], rows[:, 1::2]) if block.has_biases else np.split(rows, 2, 1)
        for part, half in zip(("gate", "up"), halves, strict=True):
            found[part + role.removeprefix("gate_up")] = np.ascontiguousarray(half)
    return found


def _add(found: dict[str, F32], spec: TensorSpec, values: F32) -> None:
    """A tensor, or its rows of one that holds several."""
    values = values + np.float32(1.0) if spec.zero_centred else values
    if spec.gguf_heads:
        halves = values.reshape(spec.gguf_heads, 2, len(values) // spec.gguf_heads // 2, -1)
        values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    if values.ndim == 3 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim == 2 and len(values) == 1:  # converters squeeze
        values = values[0]
    if spec.gguf_rows is not None:
        first, whole = spec.gguf_rows
        joined = found.setdefault(spec.gguf, np.zeros((whole, *values.shape[1:]), np.float32))
        joined[first : first + len(values)] = values
        return
    found.setdefault(spec.gguf, values)


def _converted(model: TinyModel, part: ModelPart, values: dict[str, F32]) -> dict[str, F32]:
    """Values by the roles that a block has in GGUF files."""
    if isinstance(part, Mla):
        by_head = values["kv_b"].reshape(part.num_heads, -1, part.kv_lora_rank)
        keys, rest = np.split(by_head, [part.qk_nope_head_dim], axis=1)
        if part.latent_scale != 1.0 and part.q_lora_rank is not None:  # folded by converters (dots3-note)
            values["latent_norm"] = values["latent_norm"] * np.float32(part.latent_scale)
            values["q_norm"] = values["q_norm"] * np.float32((part.hidden_size / part.q_lora_rank) ** 0.5)
        values |= {"k_b": np.ascontiguousarray(keys.swapaxes(1, 2)), "v_b": np.ascontiguousarray(rest)}
    for role in [role for role in values if role.startswith("table ") and role.endswith(".0")]:
        shards = [each for name, each in values.items() if name.startswith(role[:-1])]
        values[role] = np.concatenate(shards)
    if "index_qk" in values:
        norm = len(values["index_k_norm"])
        values["index_q"], values["index_k"] = values["index_qk"][:-norm], values["index_qk"][-norm:]
    if "of_hidden" in values:  # MTP layer
        values["projection"] = np.concatenate([values["of_embedding"], values["of_hidden"]], 1)
    if "gate_up" in values:  # shared experts
        values["gate"], values["up"] = np.split(values["gate_up"], 2)
    if isinstance(part, GatedDelta):
        values["decay"] = -np.exp(values["decay"])
        if "qkvz" in values:
            values |= _ungrouped(part, values["qkvz"])
        else:
            values = _tiled_values(part, values)
    return values


def _ungrouped(part: GatedDelta, values: F32) -> dict[str, F32]:
    """Qwen3-Next's queries, keys, values and z, which checkpoints have by key head."""
    groups = values.reshape(part.num_k_heads, -1, part.hidden_size)
    of_values = part.values // part.num_k_heads
    ends = np.cumsum([part.key_dim, part.key_dim, of_values])
    q, k, v, z = (each.reshape(-1, part.hidden_size) for each in np.split(groups, ends, 1))
    return {"qkv": np.concatenate([q, k, v]), "z": np.ascontiguousarray(z)}


def _tiled_values(part: GatedDelta, values: dict[str, F32]) -> dict[str, F32]:
    """Qwen3.5's tensors with value heads that go round the key heads."""

    def tiled(rows: F32) -> F32:
        by_head = rows.reshape(part.num_k_heads, part.num_v_heads // part.num_k_heads, -1, *rows.shape[1:])
        return np.ascontiguousarray(by_head.swapaxes(0, 1)).reshape(rows.shape)

    first = part.channels - part.values
    found = dict(values)
    for role in ("qkv", "conv"):
        found[role] = np.concatenate([values[role][:first], tiled(values[role][first:])])
    found |= {role: tiled(values[role]) for role in ("z", "a", "b", "decay", "decay_bias")}
    return found | {"out": np.ascontiguousarray(tiled(values["out"].T).T)}


def _factors(model: TinyModel) -> dict[str, F32]:
    """Frequency factors of the rotation, for families whose files have them."""
    if not isinstance(model, TinyFamily):
        return {}
    if model.row.gguf == "llama4" and model.rope_scaling is not None:
        rope = model.rope_scaling
        dims = np.arange(0, model.head_dim, 2, dtype=np.float32) / np.float32(model.head_dim)
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * model.rope_theta**dims)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = np.clip((turns - low) / (high - low), 0, 1) if high > low else turns > low
        return {"rope_freqs.weight": (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)}
    if model.row.gguf == "gemma4":  # which pairs turn
        dim, share = model.settings["global_head_dim"], model.settings["rope_parameters"]["full_attention"]
        turning = int(share["partial_rotary_factor"] * dim // 2)
        factors = np.where(np.arange(dim // 2) < turning, 1.0, 1e30).astype(np.float32)
        return {"rope_freqs.weight": factors}
    return {}


def named(model: TinyFamily) -> Iterator[tuple[str, str]]:
    """(Hugging Face's name, GGUF's) of every tensor outside experts that both kinds of files have as one."""
    for part in parts_of(model.parsed, predicting=False):
        if not isinstance(part, RoutedExperts):
            theirs = part.tensors(lambda spec: any(each in spec.gguf for each in model.row.gguf_stored))
            for role, spec in part.tensors(model.is_stored).items():
                if role in theirs and theirs[role].gguf_rows is None:
                    yield spec.name, theirs[role].gguf
