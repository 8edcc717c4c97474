"""Peak memory of `twofold finetune` beside the weights as they are stored, on experts of Qwen3-30B-A3B's shape.

python -m tests.training.test_peak_memory prints the figures.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from tests.tiny_models.writing import TinyModel, tiny_config, to_bfloat16, write_tiny_model

MODEL: Final = TinyModel(
    hidden_size=2048, num_layers=2, num_heads=32, num_kv_heads=4, head_dim=128, vocab_size=2048,
    moe_intermediate_size=768, num_experts=128, top_k=8, dtype="bfloat16", max_position_embeddings=1024,
)  # fmt: skip
SHARE: Final = 1.25
"""Most memory, of what the experts and the dense part take as they are stored."""
LIBRARIES: Final = 640 << 20
"""torch, transformers and PEFT, as the forecast counts them."""
_FORECAST: Final = re.compile(
    r"adapter and optimiser (?P<adapter>[0-9.]+), activations (?P<activations>[0-9.]+)"
)
_MEASURE: Final = """
import resource, subprocess, sys
code = subprocess.run([sys.executable, "-m", "twofold.tools.cli", *sys.argv[1:]]).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
sys.exit(code)
"""


@dataclass(frozen=True)
class Peak:
    """Bytes of one run."""

    weights: int
    """Files of the model."""
    others: int
    """Adapter with its optimiser, and activations, by the forecast; and LIBRARIES."""
    peak: int
    """Highest resident memory, pages of mapped files included."""

    @property
    def share(self) -> float:
        """Memory for weights, of what they take as they are stored."""
        return (self.peak - self.others) / self.weights


def write_drawn_model(directory: Path) -> Path:
    """The model with weights that repeat a few random megabytes: 2.5 GB in seconds."""
    write_tiny_model(directory, replace(MODEL, num_experts=8, top_k=8))
    (directory / "config.json").write_text(json.dumps(tiny_config(MODEL)))
    drawn = to_bfloat16(np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype(np.float32)).tobytes()
    header: dict[str, object] = {}
    sizes: list[int] = []
    for name, shape in _shapes().items():
        begin = sum(sizes)
        sizes.append(2 * int(np.prod(shape)))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, begin + sizes[-1]]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for size in sizes:
            for begin in range(0, size, len(drawn)):
                stream.write(drawn[: min(len(drawn), size - begin)])
    return directory


def _shapes() -> dict[str, tuple[int, ...]]:
    hidden, heads, keys = (
        MODEL.hidden_size,
        MODEL.num_heads * MODEL.head_dim,
        MODEL.num_kv_heads * MODEL.head_dim,
    )
    inner = MODEL.moe_intermediate_size
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (MODEL.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (MODEL.vocab_size, hidden),
    }
    for layer in range(MODEL.num_layers):
        prefix = f"model.layers.{layer}"
        found |= {
            f"{prefix}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")
        }
        found |= {f"{prefix}.self_attn.{name}_norm.weight": (MODEL.head_dim,) for name in ("q", "k")}
        sizes = {"q": (heads, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, heads)}
        found |= {f"{prefix}.self_attn.{name}_proj.weight": size for name, size in sizes.items()}
        found[f"{prefix}.mlp.gate.weight"] = (MODEL.num_experts, hidden)
        for expert in range(MODEL.num_experts):
            of_expert = f"{prefix}.mlp.experts.{expert}"
            found |= {f"{of_expert}.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
            found[f"{of_expert}.down_proj.weight"] = (hidden, inner)
    return found


def measure(model: Path, folder: Path, *further: str) -> Peak:
    """Peak of a short run. Raises RuntimeError if it fails."""
    data = folder / "data.jsonl"
    lines = [f"the {word} and the thing and the king " * 12 for word in ("cat", "hill", "sea", "moon")]
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines * 2))
    words = [
        *("finetune", str(model), "--data", str(data), "--out", str(folder / "out"), "--rank", "8"),
        *(
            "--max-steps",
            "3",
            "--dtype",
            "bfloat16",
            "--targets",
            "experts",
            "--accelerator",
            "none",
            *further,
        ),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE, *words], capture_output=True, text=True, env=environment, timeout=560
    )
    found = _FORECAST.search(run.stderr)
    if run.returncode != 0 or found is None:
        raise RuntimeError(run.stderr)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    others = LIBRARIES + int(1e9 * sum(map(float, found.groupdict().values())))
    return Peak(weights, others, int(run.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_weights_take_little_more_memory_than_on_disk(tmp_path: Path) -> None:
    found = measure(write_drawn_model(tmp_path / "model"), tmp_path, "--activation-bytes", "0")
    assert found.share < SHARE, found


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for number, given in enumerate(sys.argv[1:] or [str(write_drawn_model(Path(folder) / "model"))]):
            place = Path(folder) / str(number)
            place.mkdir()
            peak = measure(Path(given), place, "--activation-bytes", "0")
            print(
                f"{given}: weights {peak.weights / 1e9:.2f} GB, activations, adapter and libraries "
                f"{peak.others / 1e9:.2f}, peak {peak.peak / 1e9:.2f}: {peak.share:.2f} × the weights"
            )
