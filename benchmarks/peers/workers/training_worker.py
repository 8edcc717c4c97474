"""Times micro-steps of LoRA training, forward, backward and AdamW, over random weights of a Qwen3-MoE shape.

    python training_worker.py '{"way": "twofold q4_k", "hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8,
                                "heads": 32, "kv_heads": 4, "head_dim": 128, "layers": 6, "tokens": 512, "rank": 8,
                                "threads": 2, "steps": 3, "seed": 0}'

`way` is "twofold FORMAT", one of transformers' experts implementations with PEFT in bfloat16 ("grouped_mm",
"batched_mm", "eager"), or "unsloth", whose own experts keep the factors apart. The dense part is transformers' in
bfloat16 in all of them, with a vocabulary of 1,024. Prints a line of JSON: seconds of each step after an untimed one,
bytes of the weights as stored, and of the process's memory before the first step and at its highest.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from benchmarks.models.random_blocks import FORMATS, random_rows

_VOCABULARY: Final = 1024
_DRAWN: Final = 1 << 20
"""Different random numbers of transformers' weights, repeated: drawing takes longer than training."""
_DTYPE: Final = torch.bfloat16


def main(task: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(task["threads"])
    torch.manual_seed(task["seed"])
    name, _, format = task["way"].partition(" ")
    model = empty_model(task, name)
    stored = hold_experts(model, task, format) if format else 0
    stored += fill(model)
    model = adapted(model, task["rank"])
    ids = torch.randint(_VOCABULARY, (1, task["tokens"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-4)
    before, seconds = memory_bytes("VmRSS"), []
    for _ in range(1 + task["steps"]):
        begun = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        seconds.append(time.perf_counter() - begun)
    if not torch.isfinite(loss):
        raise ValueError(f"the loss is {float(loss)}")
    return {
        "seconds": seconds[1:],
        "stored_bytes": stored,
        "loaded_bytes": before,
        "peak_bytes": memory_bytes("VmHWM"),
    }


def empty_model(task: dict[str, Any], implementation: str) -> Any:
    """transformers' model on the meta device."""
    if implementation == "unsloth":
        os.environ |= {"HF_HUB_OFFLINE": "1", "UNSLOTH_COMPILE_LOCATION": tempfile.mkdtemp()}
        import unsloth  # noqa: F401  before transformers
        from unsloth_zoo.temporary_patches.common import TEMPORARY_PATCHES

        for patch in TEMPORARY_PATCHES:  # its split form, which its own loaders turn on
            patch()
        implementation = "grouped_mm"
    import transformers

    config = transformers.Qwen3MoeConfig(
        hidden_size=task["hidden"],
        moe_intermediate_size=task["intermediate"],
        num_experts=task["experts"],
        num_experts_per_tok=task["top_k"],
        num_hidden_layers=task["layers"],
        num_attention_heads=task["heads"],
        num_key_value_heads=task["kv_heads"],
        head_dim=task["head_dim"],
        vocab_size=_VOCABULARY,
        norm_topk_prob=True,
    )
    if implementation == "twofold":
        from twofold.training import enable

        enable()
    with torch.device("meta"):
        kind: Any = transformers.AutoModelForCausalLM
        return kind.from_config(config, dtype=_DTYPE, experts_implementation=implementation)


def hold_experts(model: Any, task: dict[str, Any], format: str) -> int:
    """Give the model's experts random weights in our store; their bytes. As `open_base` with files."""
    from twofold.blocks import ops
    from twofold.experts.packing import make_store
    from twofold.experts.slot_plan import MoeShape
    from twofold.training.base import expert_modules
    from twofold.training.experts import ExpertLayer
    from twofold.weights.weight_format import WeightMatrix, element_type

    hidden, inner, layers = task["hidden"], task["intermediate"], task["layers"]
    rng, pool = np.random.default_rng(task["seed"]), ops.ThreadPool(task["threads"])
    shape = MoeShape(layers, task["experts"], task["top_k"], hidden, inner, ((format,) * 3,) * layers)
    store = make_store(shape, pool)

    def matrix(rows: int, columns: int) -> WeightMatrix:
        data = random_rows(rng, FORMATS[format], rows, columns)
        return WeightMatrix(data.view(element_type(format)), format, columns)

    for layer, module in enumerate(expert_modules(model)):
        for expert in range(task["experts"]):
            matrices = matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner)
            store.put(pool, layer, expert, [matrices])
        for name, parameter in module.named_parameters(recurse=False):
            shape_alone = torch.zeros((), dtype=_DTYPE).expand(parameter.shape)
            setattr(module, name, torch.nn.Parameter(shape_alone, requires_grad=False))
        module.twofold_layer = ExpertLayer(pool, store, layer)  # type: ignore[assignment]
    return int(store.mean_expert_bytes) * task["experts"] * task["layers"]


def fill(model: Any) -> int:
    """Give random numbers to all parameters that have no memory; their bytes."""
    drawn = (0.02 * torch.randn(_DRAWN)).to(_DTYPE)
    filled = 0
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            values = torch.empty(parameter.shape, dtype=parameter.dtype)
            flat = values.view(-1)
            for begin in range(0, len(flat), _DRAWN):
                flat[begin : begin + _DRAWN] = drawn[: len(flat) - begin]
            filled += values.nbytes
            setattr(module, name, torch.nn.Parameter(values, requires_grad=False))
        buffers = [name for name, each in module.named_buffers(recurse=False) if each.is_meta]
        for name in buffers:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        if buffers:
            model._init_weights(module)  # rotations
    return filled


def adapted(model: Any, rank: int) -> Any:
    """With factors of attention and experts."""
    import peft

    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, settings).train()


def memory_bytes(name: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)[1])  # type: ignore[index]


if __name__ == "__main__":
    try:
        print(json.dumps(main(json.loads(sys.argv[1]))))
    except ImportError as error:
        print(json.dumps({"error": str(error)}))
        sys.exit(3)
