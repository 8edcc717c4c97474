"""`twofold lab record`: read a text with a model and record its routing, as if every token had been decoded.

The text is cut into sequences of equal length, each read by teacher forcing; no token is generated. The trace has the
format of `--record-routing` (`telemetry/routing.py`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.api.regular_file import read_regular_text
from twofold.api.types import SamplingParams
from twofold.engine import Engine
from twofold.models.bundled import bundled_model_path
from twofold.telemetry.routing import RoutingRecorder


def record_text(
    text: str, output: Path, *, model: str, sequence_tokens: int, cpu_threads: int = 0
) -> tuple[int, int]:
    """Write the routing of `text` to `output` (.npz). Returns (sequences, tokens).

    Raises:
        ConfigError: the text is empty, or the requested sequences are longer than the context.
        ModelLoadError: the model cannot be used. KernelError: the native code failed.
    """
    recorder = RoutingRecorder(output, keep="all", flag="--output")
    engine = Engine.load(
        # No prefix cache: sequences with a common prefix are computed from their start all the same.
        EngineConfig(model=model, accelerator="none", cpu_threads=cpu_threads, enable_prefix_caching=False),
        telemetry=recorder,
    )
    try:
        tokens = engine.tokenizer.encode(text)
        if not tokens:
            raise ConfigError("the text is empty; give a file with at least one word")
        if not 1 <= sequence_tokens < engine.max_context:
            raise ConfigError(
                f"--sequence-tokens was given {sequence_tokens}; it takes 1 to {engine.max_context - 1} with this model"
            )
        sequences = [tokens[i : i + sequence_tokens] for i in range(0, len(tokens), sequence_tokens)]
        reading = SamplingParams(max_tokens=1, ignore_eos=True)
        show_progress = sys.stderr.isatty()
        for number, sequence in enumerate(sequences):
            engine.generate(sequence, reading, request_id=f"text-{number}", endpoint="lab")
            if show_progress:
                print(
                    end=f"\r\x1b[Krecording {number + 1}/{len(sequences)} sequences",
                    file=sys.stderr,
                    flush=True,
                )
        if show_progress:
            print(end="\r\x1b[K", file=sys.stderr)
    finally:
        engine.close()
    # The file is written only if the recording is complete: an error above leaves no file.
    recorder.close()
    return len(sequences), len(tokens)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", help="UTF-8 text file to read")
    parser.add_argument("--output", required=True, metavar="FILE.npz", help="trace to write")
    parser.add_argument(
        "--model", default="", help="model directory or GGUF file (default: the bundled model)"
    )
    parser.add_argument(
        "--sequence-tokens", type=int, default=1024, help="tokens of one sequence (default: 1024)"
    )


def run(args: argparse.Namespace) -> int:
    path = Path(args.text)
    try:
        text = read_regular_text(path, 1 << 30)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the text {path} cannot be read: {error}; give a UTF-8 file") from error
    sequences, tokens = record_text(
        text,
        Path(args.output),
        model=args.model or str(bundled_model_path()),
        sequence_tokens=args.sequence_tokens,
    )
    print(f"{args.output}: {sequences} sequences, {tokens} tokens")
    return 0
