"""Twofold, llama.cpp, ik_llama.cpp and transformers on the same random model of a real shape, in turn.

    python -m benchmarks.peers --shape qwen3-30b-a3b --layers 6 --format q8_0 --cache DIR [--llama-python PATH]

The model is written once per format to --cache as a GGUF file and kept there (delete it when you are done, or give
--delete). Each engine measures in its own process: a prompt of --prompt-tokens random tokens (pp), then --new-tokens
steps of one token after it (tg). They take turns for --rounds rounds; medians and ratios are shown. llama.cpp first
tries flash attention, memory mapping and repacking on and off and keeps what is fastest, ik_llama.cpp (--ik) flash
attention, -rtr and -fmoe; transformers runs BF16 only, where memory has room. Stop other work before: an engine that
spins at a barrier loses more to a busy machine than one that sleeps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.peers import machine
from benchmarks.peers.ceilings import measure as measure_ceilings
from benchmarks.peers.engines import (
    Engine,
    IkLlamaEngine,
    LlamaEngine,
    PeerError,
    TransformersEngine,
    TwofoldEngine,
    Workload,
)
from benchmarks.peers.gguf_model import file_name, model_bytes, write_model
from benchmarks.peers.hf_model import write_directory
from benchmarks.peers.random_blocks import GGUF_FORMATS
from benchmarks.peers.report import DOCS, as_report, markdown, read_report, table, write_section
from benchmarks.peers.rounds import Series, alternate
from benchmarks.peers.shapes import FULL_SHAPES, FullShape

ENGINES = ("twofold", "llama.cpp", "ik_llama.cpp", "transformers")
SECTION: Final = "peers"
PROGRAM: Final = "benchmarks.peers"
MAKER: Final = f"python -m {PROGRAM} --write-docs"
_ROOM_BYTES = 3 * 1024**3
"""Memory that transformers needs in addition to the weights."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=FULL_SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=6, help="of the shape's (default: 6)")
    parser.add_argument(
        "--format", action="append", choices=GGUF_FORMATS, help="again for more (default: q8_0)"
    )
    parser.add_argument(
        "--engine", action="append", choices=ENGINES, help="again for more (default: all there are)"
    )
    parser.add_argument("--cache", type=Path, help="directory for the models; needed to measure")
    parser.add_argument(
        "--delete", action="store_true", help="delete each model that this run made, after its rounds"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of every engine (default: 5)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="within a turn; its median counts (default: 3)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument(
        "--threads", type=int, default=machine.physical_cores(), help="default: physical cores"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompt")
    parser.add_argument(
        "--llama-python", default=sys.executable, metavar="PATH", help="interpreter with llama-cpp-python"
    )
    parser.add_argument(
        "--ik",
        metavar="PATH",
        help="measure ik_llama.cpp, too: an interpreter with ik-llama-cpp-python, or a libllama.so (or its directory) "
        "that this interpreter's ik-llama-cpp-python shall load",
    )
    parser.add_argument("--transformers-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--twofold-python", default=sys.executable, metavar="PATH")
    parser.add_argument(
        "--no-ceilings", action="store_true", help="do not measure what the machine can do at most"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the list of engine, format, test, tokens/s, ratio"
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="also write everything, samples included, as JSON"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the table as docs/explanation/performance.md has it"
    )
    parser.add_argument(
        "--from-report", type=Path, metavar="FILE", help="measure nothing; show what --report wrote"
    )
    parser.add_argument("--write-docs", action="store_true", help="put the table into the performance page")
    args = parser.parse_args(arguments)
    _check(parser, args)
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse arguments that do not fit together; complete the lists of formats and engines."""
    for name in ("rounds", "repeats", "prompt_tokens", "new_tokens", "threads", "layers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} was given {getattr(args, name)}; it takes 1 or more")
    if args.layers > FULL_SHAPES[args.shape].layers:
        parser.error(f"--layers was given {args.layers}; {args.shape} has {FULL_SHAPES[args.shape].layers}")
    if args.from_report is None and args.cache is None:
        parser.error("--cache DIR is needed: where the random models are written")
    args.format = list(dict.fromkeys(args.format or ["q8_0"]))
    if args.ik is None and "ik_llama.cpp" in (args.engine or ()):
        parser.error("--engine ik_llama.cpp needs --ik PATH, where it is found")
    there = [name for name in ENGINES if name != "ik_llama.cpp" or args.ik is not None]
    args.engine = [name for name in there if name in (args.engine or there)]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all formats in turn; PeerError if no engine could be measured."""
    shape = FULL_SHAPES[args.shape].with_layers(args.layers)
    work = Workload(args.prompt_tokens, args.new_tokens, args.repeats, args.threads, args.seed, shape.vocab)
    described = machine.describe()
    ceilings: dict[str, float] = {}

    def raise_ceilings() -> None:
        # Before each format and after the last: a moment in which the machine was busy must not bound the rest.
        if not args.no_ceilings:
            say("measuring what the machine can do at most")
            for name, rate in measure_ceilings(args.threads, args.twofold_python).items():
                ceilings[name] = max(rate, ceilings.get(name, 0.0))

    series: list[Series] = []
    left_out: dict[str, dict[str, str]] = {}
    details: dict[str, dict[str, Any]] = {}
    for format_name in args.format:
        model = args.cache / file_name(shape, format_name, args.seed)
        directory = model.with_suffix("")
        made = [path for path in (model, directory) if not path.exists()]
        raise_ceilings()
        try:
            make_model(model, shape, format_name, args.seed)
            engines, missing = engines_for(args, model, directory, shape, format_name)
            outcome = alternate(engines, model, work, format_name, args.rounds, say)
        finally:
            if args.delete:
                remove(made)
        series += outcome.series
        left_out[format_name] = missing | outcome.left_out
        details[format_name] = outcome.details
    if not series:
        reasons = "; ".join(f"{engine}: {why}" for row in left_out.values() for engine, why in row.items())
        raise PeerError(f"nothing could be measured. {reasons}")
    raise_ceilings()
    run = {
        "date": machine.today(),
        "command": machine.command_line(PROGRAM),
        "shape": args.shape,
        "layers": args.layers,
        "rounds": args.rounds,
        "machine": described,
        "ceilings": ceilings,
    }
    return as_report(series, {name: why for name, why in left_out.items() if why}, details, run)


def make_model(model: Path, shape: FullShape, format_name: str, seed: int) -> None:
    """Write the file unless the cache has it."""
    if model.exists():
        say(f"{model.name}: in the cache")
        return
    shown = -1

    def progress(done: int, whole: int) -> None:
        nonlocal shown
        if whole > 1e8 and 10 * done // whole > shown:
            shown = 10 * done // whole
            say(f"writing {model.name}: {done / 1e9:.1f} of {whole / 1e9:.1f} GB")

    try:
        write_model(model, shape, format_name, seed, progress)
    except ImportError as error:
        raise PeerError(f"{error}; install it: pip install 'twofold[peers]'") from error
    except ValueError as error:
        raise PeerError(str(error)) from error


def engines_for(
    args: argparse.Namespace, model: Path, directory: Path, shape: FullShape, format_name: str
) -> tuple[list[Engine], dict[str, str]]:
    """The engines asked for that can run this format, and why others cannot."""
    engines: list[Engine] = []
    missing: dict[str, str] = {}
    if "twofold" in args.engine:
        engines.append(TwofoldEngine(args.twofold_python))
    if "llama.cpp" in args.engine:
        engines.append(LlamaEngine(args.llama_python))
    if "ik_llama.cpp" in args.engine:
        engines.append(IkLlamaEngine(args.ik))
    if "transformers" in args.engine:
        needed = model_bytes(shape, format_name) + _ROOM_BYTES
        available = machine.available_memory_bytes()
        if format_name != "bf16":
            missing["transformers"] = "it is compared on bf16 only"
        elif needed > available:
            missing["transformers"] = (
                f"it needs {needed / 1e9:.0f} GB of memory, {available / 1e9:.0f} are free"
            )
        else:
            if not (directory / "config.json").exists():
                say(f"writing {directory.name} for transformers")
                write_directory(model, shape, directory)
            engines.append(TransformersEngine({model: directory}, args.transformers_python))
    return engines, missing


def remove(paths: list[Path]) -> None:
    """Delete models that this run made."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        report = read_report(args.from_report) if args.from_report else measure(args)
        if args.report is not None:
            args.report.write_text(json.dumps(report, indent=1), encoding="utf-8")
        if args.write_docs:
            write_section(DOCS, SECTION, MAKER, markdown(report))
    except (PeerError, OSError, ValueError) as error:
        say(f"{PROGRAM}: {error}")
        return 2
    if args.json:
        print(json.dumps(report["rows"], indent=1))
    elif args.markdown:
        print(markdown(report))
    else:
        print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
