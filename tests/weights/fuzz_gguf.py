"""Damages GGUF files at random and opens them: whatever is wrong must be a ModelLoadError, at once, in little memory.

    python -m tests.weights.fuzz_gguf --inputs 100000 --seed 0

Half of the inputs have wrong bytes, half are well-formed with wrong metadata. Each is read three ways: its header, as a
model (configuration, all weights), and its tokenizer. Ends with exit code 1 at the first other exception, and
leaves that input in the working directory as fuzz_gguf_failure.gguf.
"""

from __future__ import annotations

import argparse
import collections
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from twofold.api.errors import ModelLoadError
from twofold.models.model_files import open_model_files
from twofold.text.tokenizer import Tokenizer
from twofold.weights.gguf_file import GgufFile

from tests.tiny_models.families import TinyErnie, TinyGlm4Moe, TinyMiniMaxM2, TinyOlmoe, TinyQwen2Moe
from tests.tiny_models.gguf import (
    damaged,
    gguf_bytes,
    gguf_parts,
    with_strange_metadata,
    write_tiny_gguf,
)
from tests.tiny_models.granite import TinyGranite
from tests.tiny_models.lfm2 import TinyLfm2
from tests.tiny_models.llama4 import TinyLlama4
from tests.tiny_models.qwen3_next import TinyQwen3Next
from tests.tiny_models.writing import TinyModel

MODELS = (
    TinyModel(hidden_size=32, moe_intermediate_size=32, num_layers=1, num_experts=2, vocab_size=267),
    TinyModel(
        "MixtralForCausalLM",
        hidden_size=32,
        moe_intermediate_size=32,
        num_layers=1,
        num_experts=2,
        vocab_size=340,
    ),
    TinyOlmoe(moe_intermediate_size=32, num_layers=1, num_experts=2, vocab_size=267),
    TinyErnie(
        hidden_size=32,
        moe_intermediate_size=32,
        intermediate_size=32,
        num_layers=2,
        num_experts=2,
        vocab_size=267,
    ),
    TinyGranite(
        hidden_size=32,
        moe_intermediate_size=32,
        shared_intermediate_size=32,
        num_layers=1,
        num_experts=2,
        vocab_size=267,
    ),
    TinyLfm2(
        hidden_size=32,
        moe_intermediate_size=32,
        intermediate_size=32,
        num_layers=2,
        num_experts=2,
        vocab_size=267,
    ),
    TinyLlama4(
        hidden_size=32,
        moe_intermediate_size=32,
        intermediate_size=32,
        num_layers=4,
        num_experts=2,
        vocab_size=267,
        moe_interval=2,
    ),
    TinyMiniMaxM2(hidden_size=32, moe_intermediate_size=32, num_layers=1, num_experts=2, vocab_size=267),
    TinyQwen2Moe(
        hidden_size=32,
        moe_intermediate_size=32,
        shared_intermediate_size=32,
        num_layers=1,
        num_experts=2,
        vocab_size=267,
    ),
    TinyGlm4Moe(
        hidden_size=32,
        moe_intermediate_size=32,
        intermediate_size=32,
        num_layers=2,
        num_experts=2,
        vocab_size=267,
        use_qk_norm=True,
        num_mtp_layers=1,
    ),
    TinyQwen3Next(
        hidden_size=32,
        moe_intermediate_size=32,
        shared_intermediate_size=32,
        num_layers=2,
        full_attention=(1,),
        num_experts=2,
        vocab_size=267,
        key_dim=8,
        value_dim=8,
    ),
)
TYPES = ("F32", "Q8_0", "Q4_0", "Q5_0", "Q5_1", "F16")


def read_all(path: Path) -> None:
    """Everything that any command reads of a model file before it computes."""
    files = open_model_files(path)
    for _, weights in files.parts():
        for part, spec in weights.specs.items():
            weights.vector(part) if len(spec.shape) == 1 else weights.stack(part)
    for layer in files.config.moe_layers:
        files.expert_weights(layer)


def read_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer.open(path)
    tokenizer.decode(tokenizer.encode("Once upon a time <|im_end|>"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    outcomes: collections.Counter[str] = collections.Counter()
    slowest_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        originals = []
        for model in MODELS:
            for kind in TYPES:
                vocabulary = "llama" if model.architecture == "MixtralForCausalLM" else "gpt2"
                write_tiny_gguf(path, model, type_of=lambda name, kind=kind: kind, vocabulary=vocabulary)  # type: ignore
                data_begin = min(tensor.offset for tensor in GgufFile.open(path).tensors.values())
                originals.append((path.read_bytes(), data_begin, gguf_parts(path)))
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.perf_counter()
        for number in range(args.inputs):
            rng = random.Random(f"{args.seed}/{number}")
            data, header_bytes, (fields, tensors, weights) = rng.choice(originals)
            if rng.random() < 0.5:
                data = damaged(data, header_bytes, rng)
            else:
                data = gguf_bytes(*with_strange_metadata(fields, tensors, rng), weights)
            path.write_bytes(data)
            begun = time.perf_counter()
            for what, read in (("header", GgufFile.open), ("model", read_all), ("tokenizer", read_tokenizer)):
                try:
                    read(path)
                    outcomes[f"{what} read"] += 1
                except ModelLoadError as error:
                    outcomes[f"{what} refused"] += 1
                    if str(path) not in str(error):
                        outcomes["file not named"] += 1
                except BaseException as error:
                    Path("fuzz_gguf_failure.gguf").write_bytes(data)
                    print(f"input {number}, {what}: {type(error).__name__}: {error}", file=sys.stderr)
                    raise
            slowest_s = max(slowest_s, time.perf_counter() - begun)
            if sys.stderr.isatty() and number % 1000 == 0:
                print(end=f"\r{number} of {args.inputs}", file=sys.stderr, flush=True)
        seconds = time.perf_counter() - started
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1e3
    print(
        f"{args.inputs} inputs in {seconds:.0f} s; the slowest took {slowest_s * 1e3:.0f} ms; "
        f"peak memory grew by {grown_mb:.0f} MB"
    )
    print(", ".join(f"{name}: {count}" for name, count in sorted(outcomes.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
