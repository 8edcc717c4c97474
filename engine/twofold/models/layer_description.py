"""A model's layers as text: the parts of each block in order, with their tensors, state and cost.

A family without a model is shown in the sizes of transformers' default configuration.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from twofold.blocks.block import Block, BlockPart, ExpertBlock, Pages, State
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.registry import Family, module_of
from twofold.weights.json_file import Fields

_NEEDED: Final[Mapping[str, Mapping[str, Any]]] = {
    "glm4_moe": {"head_dim": 128},
    "dots1": {"num_experts": 128, "num_experts_per_tok": 6},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "deepseek_ocr2": {"text_config": {"num_experts_per_tok": 6}},
    "granitemoe_swa": {"num_hidden_layers": 32},
    "lfm2_moe": {"layer_types": ["full_attention" if n % 4 == 2 else "conv" for n in range(32)]},
    "gemma3_vision": {"text_config": {"num_hidden_layers": 26}},
    "qwen3_vl": {"text_config": {"num_hidden_layers": 32}},
    "qwen3_vl_moe": {"text_config": {"head_dim": 128}},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "qwen3_omni_moe": {"thinker_config": {"text_config": {"head_dim": 128}}},
    "ernie4_5_vl_moe": {"text_config": {"use_bias": False}},
    "minimax_m3": {
        "text_config": {
            "layer_types": ["full_attention" if n < 3 else "minimax_m3_sparse" for n in range(60)]
        }
    },
    "qwen4_exp": {
        "text_config": {
            "indexer_n_heads": 4,
            "indexer_head_dim": 128,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 4,
        }
    },
    "kimi_k25": {"text_config": {"model_type": "deepseek_v3"}},
    "step3p7": {"text_config": {"model_type": "step3p5"}},
    "mistral_large4": {"text_config": {"model_type": "mistral_large4_text"}},
}
"""Keys without a usable default, by family."""


def example_config(family: Family) -> ModelConfig:
    """A configuration of the family with the sizes of transformers' defaults."""
    keys = {"architectures": [family.classes[0]], **_NEEDED.get(family.module, {})}
    fields = Fields(f"{family.module}, default configuration", keys)
    return module_of(family).parse_config(fields, GenerationDefaults())


def describe_layers(config: ModelConfig) -> Iterator[str]:
    """Lines for each kind of layer: its numbers, then its blocks and their parts in order of computation."""
    kinds: dict[tuple[Block, ...], list[int]] = {}
    for number, layer in enumerate(config.layers):
        kinds.setdefault(tuple(dataclasses.replace(block, layer=0) for block in layer), []).append(number)
    for layer, numbers in kinds.items():
        yield f"{'layer' if len(numbers) == 1 else 'layers'} {_ranges(numbers)} of {config.num_layers}"
        for block in layer:
            yield from _block_lines(block)


def _block_lines(block: Block) -> Iterator[str]:
    parts = [part for part in block.parts(lambda spec: False) if part.tensors or part.settings is not None]
    state = "; ".join(map(_state, block.state))
    yield f"  {type(block).__name__}{f': keeps {state}' if state else ''}"
    if isinstance(block, ExpertBlock):
        routed = block.routed
        hidden, sizes = routed.hidden_size, routed.intermediate_sizes
        count = routed.num_experts // len(sizes)
        for inner, kind in zip(sizes, ("", " of pictures"), strict=False):
            yield (
                f"    experts   {count}{kind} of gate and up {inner} × {hidden}, down {hidden} × {inner}; "
                f"{routed.top_k} per token; {count * 3 * hidden * inner:,} weights"
            )
        return
    for part in parts:
        shown = "; ".join(filter(None, (_settings(part, block), _tensors(part), _cost(part))))
        yield f"    {part.name:9} {shown}".rstrip()


def _settings(part: BlockPart, block: Block) -> str:
    """A part's kind and the fields that differ from their defaults; a whole block has only its tensors."""
    settings = part.settings
    if settings is block or not dataclasses.is_dataclass(settings) or isinstance(settings, type):
        return ""
    given = ((each, getattr(settings, each.name)) for each in dataclasses.fields(settings))
    fields = [f"{each.name} {_shown(value)}" for each, value in given if value != each.default]
    name = type(settings).__name__
    return f"{name} ({', '.join(fields)})" if fields else name


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _tensors(part: BlockPart) -> str:
    shapes = (f"{role} {' × '.join(map(str, spec.shape))}" for role, spec in part.tensors.items())
    return ", ".join(shapes)


def _cost(part: BlockPart) -> str:
    weights = sum(math.prod(spec.shape) for spec in part.tensors.values() if len(spec.shape) > 1)
    if part.per_position is not None:
        cost = part.per_position
        return f"{cost.num_bytes:,.0f} bytes and {cost.flops:,.0f} FLOP per position attended to"
    return f"{weights:,} weights" if weights else ""


def _state(kept: State) -> str:
    if isinstance(kept, Pages):
        return f"{kept.planes} × {kept.elements} elements per token"
    return f"{kept.num_bytes:,} bytes per sequence"


def _ranges(numbers: list[int]) -> str:
    """0-2, 4, 6: ascending numbers as ranges."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
