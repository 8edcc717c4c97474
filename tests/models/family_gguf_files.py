"""Writes random models of the families that llama.cpp loads, for a comparison by hand:

python -m tests.models.family_gguf_files DIR [NAME ...]
python -m benchmarks.peers.gguf_agreement DIR/*.gguf --f32-cache
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.models.drawn_described import EXAMPLES as DESCRIBED
from tests.models.drawn_families import LLAMA3, all_chosen
from tests.models.test_formats_forward import encode
from tests.tiny_models.deepseek import TinyDeepseek
from tests.tiny_models.families import (
    TinyErnie,
    TinyGlm4Moe,
    TinyGlm4MoeLite,
    TinyMiniMaxM2,
    TinyOlmoe,
    TinyQwen2Moe,
)
from tests.tiny_models.gemma4 import TinyGemma4
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.gpt_oss import TinyGptOss
from tests.tiny_models.granite import TinyGranite
from tests.tiny_models.lfm2 import TinyLfm2
from tests.tiny_models.llama4 import TinyLlama4
from tests.tiny_models.qwen3_next import TinyQwen3Next, TinyQwen35Moe
from tests.tiny_models.writing import TinyModel

YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
V3 = TinyDeepseek(
    hidden_size=64, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32,
    moe_intermediate_size=32, intermediate_size=96, vocab_size=267, num_experts=16, top_k=4, num_groups=4,
    top_groups=2, routed_scaling_factor=2.5, rope_scaling=YARN, max_position_embeddings=512,
)  # fmt: skip
V2 = replace(
    V3, architecture="DeepseekV2ForCausalLM", num_groups=1, top_groups=1, routed_scaling_factor=1.0,
    num_shared_experts=2, rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
)  # fmt: skip
# llama.cpp knows queries without a low rank by the number of layers.
DEEPSEEK = {"v3": V3, "v2": V2, "v2-lite": replace(V2, q_lora_rank=None, num_layers=27)}
GLM = TinyGlm4Moe(
    hidden_size=256, head_dim=64, moe_intermediate_size=256, intermediate_size=256, vocab_size=267, num_experts=16,
    top_k=4, routed_scaling_factor=2.5, max_position_embeddings=512,
)  # fmt: skip
FLASH = TinyGlm4MoeLite(
    hidden_size=256, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64,
    moe_intermediate_size=64, intermediate_size=96, vocab_size=267, num_experts=16, top_k=4, routed_scaling_factor=1.8,
    max_position_embeddings=512,
)  # fmt: skip
# In llama.cpp a head's keys and values have one size.
NEXT = TinyQwen3Next(
    hidden_size=512, head_dim=64, moe_intermediate_size=64, shared_intermediate_size=128, vocab_size=267,
    num_experts=16, top_k=4, num_layers=4, full_attention=(3,), key_dim=64, value_dim=64, num_v_heads=8,
    max_position_embeddings=512,
)  # fmt: skip
SMALL = {
    "hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 256, "vocab_size": 267, "num_experts": 16, "top_k": 4,
    "max_position_embeddings": 512,
}  # fmt: skip


def small(family: type[TinyModel], **changed: Any) -> TinyModel:
    return family(**SMALL | changed)


# What is written with every matrix in each of KINDS. llama.cpp ignores groups of GLM models; published ones have one.
OTHERS: dict[str, TinyModel] = {
    "glm-air": GLM,
    "glm-flash": FLASH,
    "olmoe": small(TinyOlmoe, num_kv_heads=4, intermediate_size=256),
    "minimax-m2": small(TinyMiniMaxM2, rotary_dim=32),
    "ernie": small(TinyErnie, intermediate_size=256),
    "granite": small(TinyGranite, architecture="GraniteMoeSharedForCausalLM", shared_intermediate_size=256),
    "lfm2": small(TinyLfm2, intermediate_size=256, attention=(2,)),
    "llama4": small(TinyLlama4, intermediate_size=256, top_k=1, moe_interval=2, rope_scaling=LLAMA3),
    "gemma4": small(TinyGemma4, global_head_dim=128, intermediate_size=256, sliding_window=32),
    "gemma4-small": small(
        TinyGemma4,
        global_head_dim=128,
        intermediate_size=256,
        sliding_window=32,
        dense=True,
        num_layers=4,
        full=(1, 3),
        num_shared=2,
        layer_input=64,
        attention_k_eq_v=False,
    ),
    "qwen2": small(TinyQwen2Moe, shared_intermediate_size=256),
    "qwen3-next": NEXT,
    "qwen3.5": TinyQwen35Moe(**{**vars(NEXT), "architecture": "Qwen3_5MoeForCausalLM"}),
    "gpt-oss": small(TinyGptOss, moe_intermediate_size=64, sliding_window=32),
    "glm": replace(GLM, use_qk_norm=True, num_shared_experts=2, first_dense=2, num_mtp_layers=1),
    **{
        model.gguf: model.resized(**SMALL, num_kv_heads=4, intermediate_size=256)
        for model in DESCRIBED.values()
        if model.fits_gguf
    },
}


KINDS = ("F32", "F16", "Q8_0", "Q4_K")


def main(directory: Path, names: list[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, model in DEEPSEEK.items():
        for split_kv in (True, False) if not names or name in names else ():
            file = directory / f"{name}{'' if split_kv else '-old'}.gguf"
            print(write_tiny_gguf(file, model, split_kv=split_kv))
    for name, other in OTHERS.items():
        kinds = (*KINDS, "MXFP4") if isinstance(other, TinyGptOss) else KINDS
        for kind in kinds if not names or name in names else ():
            if kind == "Q4_K" and other.moe_intermediate_size % 256:
                continue  # its rows do not fill blocks of 256
            if kind in ("Q8_0", "Q4_K", "MXFP4"):  # all experts: rounding cannot change the choice
                other = all_chosen(other)
            file = directory / f"{name}-{kind}.gguf"
            encoder = encode if kind == "Q4_K" else None
            print(write_tiny_gguf(file, other, type_of=partial(type_of, kind), encode=encoder))


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
