"""Damages model files of every family and of every scheme that quantises, at random, and opens them: whatever is wrong
must be a ModelLoadError of one line, at once, in little memory.

    python -m tests.models.fuzz_families --inputs 10000 --seed 0 [FAMILY ...]

Ends with exit code 1 if anything else came of one; FAMILY --first NUMBER --inputs 1 repeats that.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from twofold.api.errors import ModelLoadError
from twofold.models.model_files import open_model_files
from twofold.models.sizing import measure_files
from twofold.text.tokenizer import Tokenizer
from twofold.weights.gguf_file import GgufFile

from tests.models.model_damages import Files, damage_directory, damage_gguf
from tests.tiny_models.family import TinyFamily
from tests.tiny_models.gguf import gguf_parts, write_tiny_gguf
from tests.tiny_models.table import EXAMPLES, LLAMA3, YARN
from tests.tiny_models.writing import TinyModel, write_tiny_model, write_tiny_tokenizer

SECONDS, MEMORY_BYTES, CHARACTERS = 5.0, 1 << 30, 3000
"""Limits per input: memory beyond that of the process, and length of the error message."""
_SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "vocab_size": 267, "intermediate_size": 32,
    "moe_intermediate_size": 32, "num_experts": 2, "top_k": 1, "num_layers": 2,
}  # fmt: skip


def _small(model: TinyModel, **also: Any) -> TinyModel:
    if isinstance(model, TinyFamily):
        return model.resized(**_SMALL | also)
    return replace(model, **_SMALL | also)


# By the module of models.registry.FAMILIES: the table's model, and others with further parts of files.
_ALSO: dict[str, dict[str, Any]] = {
    "gemma4": {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma4-small": {
        "num_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": []},
    "minimax_m2": {"rotary_dim": 8},
    "minimax_m3": {"index_n_heads": 1},
    "mimo_v2_flash": {"num_heads": 4, "head_dim": 12},
    "ernie4_5_moe": {"moe_layer_interval": 1},
    "ernie4_5_vl_moe": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
    },
    "mixtral": {"vocab_size": 340},
    "qwen3_moe": {"mlp_only_layers": (0,), "attention_bias": True},
}
_FURTHER: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "rope_scaling": YARN,
        "expert_layout": "fused",
        "rope_form": "rope_scaling",
        "dtype": "bfloat16",
    },
    "mixtral": {"sliding_window": 8},
    "gpt_oss": {"rope_scaling": YARN},
    "gemma4": {"nested": True},
    "llama4": {"rope_scaling": LLAMA3, "nested": True},
    "deepseek_v3": {"rope_scaling": None},
}
_TINY = {name: _small(model, **_ALSO.get(name, {})) for name, model in EXAMPLES.items()}
MODELS: dict[str, list[TinyModel]] = {name: [model] for name, model in _TINY.items() if "-" not in name}
for name, changed in _FURTHER.items():
    MODELS[name].append(_small(EXAMPLES[name], **_ALSO.get(name, {}), **changed, num_shards=2))
for name in _TINY.keys() - MODELS.keys():
    MODELS[name.partition("-")[0]].append(replace(_TINY[name], num_shards=2))
_LLAMA = MODELS["mixtral"][0]
_SCHEMES = {
    "compressed-tensors": (
        "int4 in groups of 32 (Kimi-K2.5's)", "int4 with zero points", "int8 in words", "int8 by row",
    ),
    "compressed-tensors, float8": ("float8 by tensor", "float8 by row"),
    "nvfp4": ("nvfp4", "modelopt nvfp4", "modelopt fp8"),
    "gptq": ("gptq", "gptq with act-order", "gptq v2 with zero points"),
    "awq": ("awq",),
}  # fmt: skip
NAMES = (*MODELS, *_SCHEMES, "fp8", "tokenizer")
Read = Callable[[Path], object]


@dataclass
class Outcomes:
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    slowest_s: float = 0.0
    faults: list[str] = field(default_factory=list)
    """Every other outcome."""


def originals(
    name: str, folder: Path
) -> list[tuple[Files, Callable[[random.Random], dict[str, bytes | None]]]]:
    """(files, what damages them) of the family: directories, and GGUF files where there are such."""
    found: list[tuple[Files, Callable[[random.Random], dict[str, bytes | None]]]] = []
    directories: list[Path] = []
    gguf: list[tuple[TinyModel, str, str]] = []
    if name in MODELS:
        for number, model in enumerate(MODELS[name]):
            directories.append(write_tiny_model(folder / f"{number}", model))
            plain = {} if model.fits_gguf else {"rope_scaling": None}
            twin = replace(model, expert_layout="separate", **plain).twin
            if number == 0 and model.gguf_architecture:
                gguf.append((twin, "Q8_0", "llama" if name == "mixtral" else "gpt2"))
    elif name in _SCHEMES:
        from tests.weights.scheme_cases import CASES, write

        for case in _SCHEMES[name]:
            directories.append(folder / case)
            write(folder / case, CASES[case], QUANTISED)
    elif name == "fp8":
        directories.append(_write_fp8(folder / "fp8"))
    else:
        (folder / "t").mkdir(parents=True)
        write_tiny_tokenizer(folder / "t")
        (folder / "t/generation_config.json").write_text('{"eos_token_id": [2, 0]}')
        directories.append(folder / "t")
        gguf += [(MODELS["qwen3_moe"][0], "F32", "gpt2"), (_LLAMA, "F32", "llama")]
    for directory in directories:
        files = {path.name: path.read_bytes() for path in directory.iterdir()}
        found.append((files, lambda rng, files=files: damage_directory(files, rng)))  # type: ignore[misc]
    for model, kind, vocabulary in gguf:
        path = folder / "model.gguf"
        write_tiny_gguf(
            path,
            model,
            type_of=lambda name, kind=kind: kind if "_exps" in name else "F32",
            vocabulary=vocabulary,
        )  # type: ignore
        data, parts = path.read_bytes(), gguf_parts(path)
        begin = min(tensor.offset for tensor in GgufFile.open(path).tensors.values())
        if name == "tokenizer":
            parts = ({key: of for key, of in parts[0].items() if key.startswith("tokenizer.")}, *parts[1:])
        found.append(
            ({path.name: data}, lambda rng, of=(data, begin, parts): {"model.gguf": damage_gguf(*of, rng)})  # type: ignore
        )
    return found


QUANTISED = TinyModel(
    hidden_size=128, moe_intermediate_size=128, num_heads=4, num_kv_heads=4, head_dim=32, num_layers=1, num_experts=2,
    vocab_size=267,
)  # fmt: skip


def _write_fp8(directory: Path) -> Path:
    """Matrices of experts with a scale for every 128 x 128."""
    import json

    import numpy as np

    from tests.tiny_models.writing import tiny_config, tiny_weights, write_weights

    write_tiny_model(directory, QUANTISED)
    weights: dict[str, Any] = dict(tiny_weights(QUANTISED))
    for name in [name for name in weights if ".experts." in name]:
        weights[name] = np.full(weights[name].shape, 0x38, np.uint8)
        weights[f"{name}_scale_inv"] = np.ones((1, 1), np.float32)
    write_weights(directory, weights)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config = tiny_config(QUANTISED) | {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def read_all(path: Path) -> None:
    """Everything that any command reads of a model before it computes."""
    files = open_model_files(path)
    measure_files(files)
    for _, weights in files.parts():
        for part, spec in weights.specs.items():
            weights.vector(part) if len(spec.shape) == 1 else weights.stack(part)
    for layer in files.config.moe_layers:
        files.expert_weights(layer)


def read_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer.open(path, vocab_size=340)
    tokenizer.decode(tokenizer.encode("Once upon a time <|im_end|>"))


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Little address space beyond what there is, and a few seconds of this process's own time."""

    def late(*_: object) -> None:
        raise AssertionError(f"takes over {SECONDS} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGVTALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, limits[1]))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def fuzz(
    name: str,
    inputs: int,
    seed: int,
    folder: Path,
    first: int = 0,
    on_refusal: Callable[[Path, str], None] | None = None,
) -> Outcomes:
    """Damages `name`'s files `inputs` times, starting at number `first`; `on_refusal` gets path and text while the
    refused file is still in place."""
    outcomes = Outcomes()
    of_family = originals(name, folder / "originals")
    places = []
    for number, (files, _) in enumerate(of_family):
        place = folder / f"{number}"
        place.mkdir()
        _write(place, files)
        places.append((place, "model.gguf" in files))
    with bounded():
        for number in range(first, first + inputs):
            rng = random.Random(f"{name}/{seed}/{number}")
            at = rng.randrange(len(of_family))
            files, damage = of_family[at]
            place, is_gguf = places[at]
            changed = damage(rng)
            _write(place, changed)
            reads: list[Read] = [read_tokenizer if name == "tokenizer" else read_all]
            if any("token" in file for file in changed):
                reads.append(read_tokenizer)
            for read in reads:
                _one(
                    read,
                    place / "model.gguf" if is_gguf else place,
                    f"{name}, input {number}",
                    outcomes,
                    on_refusal,
                )
            _write(place, {file: files[file] for file in changed})
    return outcomes


def _write(place: Path, files: dict[str, bytes | None] | Files) -> None:
    for name, data in files.items():
        if data is None:
            (place / name).unlink()
        else:
            (place / name).write_bytes(data)


def _one(
    read: Read, path: Path, where: str, outcomes: Outcomes, on_refusal: Callable[[Path, str], None] | None
) -> None:
    begun = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        read(path)
        outcomes.counts["read"] += 1
    except ModelLoadError as error:
        text = str(error)
        outcomes.counts["refused"] += 1
        if on_refusal is not None:
            on_refusal(path, text)
        wrong = [
            problem
            for problem, is_so in (
                ("does not name the file", str(path) not in text),
                ("is not one line of print", not text.isprintable()),
                ("is too long", len(text) > CHARACTERS),
            )
            if is_so
        ]
        if wrong:
            outcomes.faults.append(f"{where}: the refusal {' and '.join(wrong)}: {text[:300]!r}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of Rust code is not an Exception
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        outcomes.faults.append(f"{where}: {type(error).__name__} in {place}: {error!s:.300}")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    outcomes.slowest_s = max(outcomes.slowest_s, time.process_time() - begun)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=NAMES)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    failed = False
    for name in args.families:
        begun = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            outcomes = fuzz(name, args.inputs, args.seed, Path(folder), args.first)
        failed = failed or bool(outcomes.faults)
        for fault in outcomes.faults:
            print(fault, file=sys.stderr)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(
            f"{name}: {dict(outcomes.counts)} in {time.process_time() - begun:.0f} s; the slowest took "
            f"{outcomes.slowest_s * 1e3:.0f} ms; peak memory {peak:.0f} MB",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
