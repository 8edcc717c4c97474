"""Writes random models of the families that llama.cpp loads, for a comparison by hand:

python -m tests.models.family_gguf_files DIR [NAME ...]
python -m benchmarks agreement DIR/*.gguf --f32-cache
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.models.gguf_encoders import encode
from tests.tiny_models.family import TinyFamily
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.table import EXAMPLES, LLAMA3, tiny

YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
SMALL = {
    "hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 256, "intermediate_size": 256, "vocab_size": 267,
    "num_experts": 16, "top_k": 4, "max_position_embeddings": 512,
}  # fmt: skip
_LATENT = {
    "hidden_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 32, "moe_intermediate_size": 32, "intermediate_size": 96, "vocab_size": 267, "num_experts": 16,
    "top_k": 4, "rope_scaling": YARN, "max_position_embeddings": 512,
}  # fmt: skip
V2 = tiny(
    "deepseek_v2",
    **_LATENT | {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    n_shared_experts=2,
)
# llama.cpp knows queries without a low rank by the number of layers.
DEEPSEEK: dict[str, TinyFamily] = {
    "v3": tiny("deepseek_v3", **_LATENT, n_group=4, topk_group=2, routed_scaling_factor=2.5),
    "v2": V2,
    "v2-lite": V2.changed(q_lora_rank=None, num_layers=27),
}
FLASH = tiny("glm4_moe_lite", **_LATENT | {"rope_scaling": None})
# llama.cpp ignores groups of GLM models; published ones have one. In it a head's keys and values have one size.
_ALSO: dict[str, dict[str, Any]] = {
    "gemma4": {"global_head_dim": 128, "sliding_window": 32},
    "gemma4-small": {"global_head_dim": 128, "sliding_window": 32, "hidden_size_per_layer_input": 64},
    "llama4": {
        "top_k": 1, "rope_scaling": LLAMA3, "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1,
    },
    "gpt_oss": {"moe_intermediate_size": 64, "sliding_window": 32},
    "qwen3_next": {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_value_heads": 8},
    "minimax_m2": {"rotary_dim": 32},
    "olmoe": {"num_kv_heads": 4},
    "deepseek_ocr2": {"num_kv_heads": 4},
}  # fmt: skip
_ALSO["qwen3_5_moe"] = _ALSO["qwen3_next"] | {"nested": False}
OTHERS = {
    name: model.resized(**SMALL | _ALSO.get(name, {}))
    for name, model in EXAMPLES.items()
    if isinstance(model, TinyFamily) and model.gguf_architecture and "kv_lora_rank" not in model.settings
}
"""What is written with every matrix in each of KINDS."""


KINDS = ("F32", "F16", "Q8_0", "Q4_K")


def main(directory: Path, names: list[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, model in DEEPSEEK.items():
        for split_kv in (True, False) if not names or name in names else ():
            file = directory / f"{name}{'' if split_kv else '-old'}.gguf"
            print(write_tiny_gguf(file, model, split_kv=split_kv))
    for name, other in OTHERS.items():
        kinds = (*KINDS, "MXFP4") if name == "gpt_oss" else KINDS
        for kind in kinds if not names or name in names else ():
            if kind == "Q4_K" and other.moe_intermediate_size % 256:
                continue  # its rows do not fill blocks of 256
            if kind in ("Q8_0", "Q4_K", "MXFP4"):  # all experts: rounding cannot change the choice
                other = other.all_chosen()
            file = directory / f"{name}-{kind}.gguf"
            encoder = encode if kind == "Q4_K" else None
            print(
                write_tiny_gguf(
                    file,
                    replace(other, expert_layout="separate"),
                    type_of=partial(type_of, kind),
                    encode=encoder,
                )
            )


def type_of(kind: str, name: str) -> str:
    """MXFP4 is for experts alone."""
    return kind if kind != "MXFP4" or "_exps" in name else "F32"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.models.family_gguf_files", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    # argparse of Python 3.11 holds the default against the choices, too: hence the empty list.
    parser.add_argument("names", nargs="*", choices=[*DEEPSEEK, *OTHERS, []], metavar="NAME")
    given = parser.parse_args()
    main(given.directory, given.names)
