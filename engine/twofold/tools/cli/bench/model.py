"""`twofold bench`: this machine's ceilings, prefill and decode speed of one request and their shares of the ceilings,
alternating comparisons with transformers and without drafts, and where the time of a step goes.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from twofold.api.errors import ConfigError, KernelError
from twofold.api.types import Chunk, SamplingParams
from twofold.tools.cli.bench.drafted_speed import DraftedBench, drafted_lines
from twofold.tools.cli.bench.prompts import Prompts
from twofold.tools.cli.bench.speed import Speed, median_speed
from twofold.tools.cli.bench.transformers_speed import TransformersBench
from twofold.tools.cli.model_options import add_model_arguments, engine_config, running_engine
from twofold.tools.cli.number_options import add_options, several, whole
from twofold.tools.cli.parser import ShortHelp

if TYPE_CHECKING:
    from twofold.engine import Engine
    from twofold.tools.cli.bench.step_profile import AnswerProfile
    from twofold.tools.cli.doctor.machine_shares import Ceilings

_COMPARE_BYTES: Final = 2 * 1024**3
"""Larger checkpoints are compared on request only: transformers holds a second copy of the weights in memory.
"""

SHORT_HELP: Final = ShortHelp(
    (
        *("--prompt-tokens", "--new-tokens", "--repeats", "--compare-transformers", "--profile", "--json"),
        *("--accelerator", "--gpu-experts-ratio", "--max-model-len", "--kv-cache-dtype", "--cpu-threads"),
        "--speculative-config",
    ),
    (
        ("bench", "the bundled demonstration model"),
        ("bench ~/models/Qwen3-30B-A3B --prompt-tokens 512,4096", "two lengths of prompts"),
        ("bench ~/models/model.gguf --accelerator none --json", "the CPU alone, for a program"),
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("What to measure")
    lengths = several(whole(1, 10_000_000))
    add_options(
        group,
        [
            (
                "--prompt-tokens",
                "N[,N…]",
                lengths,
                [128],
                "length of the prompt, or several to measure in turn",
            ),
            ("--new-tokens", "N", whole(2, 10_000_000), 128, "length of the answer"),
            (
                "--depth",
                "N",
                whole(0, 10_000_000),
                0,
                "random tokens that are in the cache before each prompt, as -d of llama-bench",
            ),
            ("--repeats", "N", whole(1, 100_000), 3, "rounds; the medians are reported"),
        ],
    )
    group.add_argument(
        "--compare-transformers",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="time transformers' generate on the same model and prompt in the same rounds "
        "(default: if transformers is installed and the weights are below 2 GiB)",
    )
    group.add_argument(
        "--random-prompt",
        type=int,
        metavar="SEED",
        help="a prompt of random tokens instead of text, the same for the same seed and vocabulary",
    )
    group.add_argument(
        "--ceilings",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure this machine's ceilings first, and print the share of them that prefill and decode reach "
        "(default: on; shares are for the CPU only)",
    )
    group.add_argument(
        "--profile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answer once more and print the step time by operation: native kinds, sampler, Python (default: on)",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    # Without a depth no prefix cache: a repeated prompt must be prefilled again, which is what is timed.
    config = dataclasses.replace(engine_config(args), enable_prefix_caching=args.depth > 0)
    ceilings: Ceilings | None = None
    if args.ceilings:
        from twofold.tools.cli.doctor.machine_shares import measure_ceilings

        # Before the model is loaded: it may take the memory that this reads.
        ceilings = measure_ceilings(config.cpu_threads, config.numa)
    profile: AnswerProfile | None = None
    with running_engine(args, config) as engine:
        prompts = Prompts(engine, depth=args.depth, seed=args.random_prompt)
        results = measure(engine, prompts, args)
        if ceilings is not None and engine.info.accelerator == "none":
            add_shares(results, ceilings, config.max_num_batched_tokens)
        if args.profile:
            from twofold.tools.cli.bench.step_profile import profile_answer

            profile = profile_answer(engine, prompts.next(args.prompt_tokens[-1]), args.new_tokens)
    if args.json:
        found: dict[str, Any] = {"ceilings": ceilings.as_json()} if ceilings else {}
        found |= results[0] | {"tests": [test for result in results for test in tests_of(result)]}
        print(json.dumps(found | ({"profile": profile.as_json()} if profile else {})))
    else:
        if ceilings is not None:
            print(ceilings.table())
        for result in results:
            print(table(result))
        if profile is not None:
            print(profile.table())
    return 0


def add_shares(results: list[dict[str, Any]], ceilings: Ceilings, step_tokens: int) -> None:
    """Add "shares" to each result: for prefill as one step, for a decoded token at half the answer's length."""
    from twofold.models.model_files import open_model_files
    from twofold.tools.cli.doctor.machine_shares import least_times

    files = open_model_files(results[0]["model"])
    for result in results:
        depth, prompt, new = result["depth"], result["prompt_tokens"], result["new_tokens"]
        prefill = least_times(ceilings, files, prompt, context_len=depth, step_tokens=step_tokens)
        decode = least_times(ceilings, files, 1, context_len=depth + prompt + new // 2, step_tokens=1)
        speed = result["twofold"]
        result["shares"] = {
            "prefill": prefill.shares(speed["prefill_ms"] * 1e-3),
            "decode": decode.shares(speed["decode_ms"] * 1e-3 / (new - 1)),
        }


def measure(engine: Engine, prompts: Prompts, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One result per prompt length, each from alternating rounds after one warm-up."""
    directory = Path(engine.info.model)
    compare, why_not = _whether_to_compare(args, directory)
    other = (
        TransformersBench(directory, try_float32=_weights_bytes(directory) < _COMPARE_BYTES)
        if compare
        else None
    )
    if other is not None:
        other.choose_fastest(prompts.next(args.prompt_tokens[0]))
    prompts.fill()
    results = []
    for length in args.prompt_tokens:
        found = measure_prompt(engine, other, partial(prompts.next, length), args)
        found |= {"prompt_tokens": length, "depth": prompts.depth}
        results.append(found if other is not None else found | {"not_compared_because": why_not})
    return results


def measure_prompt(
    engine: Engine,
    other: TransformersBench | None,
    next_prompt: Callable[[], list[int]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Medians of alternating rounds with these prompts, which are all the same if there is another engine."""
    ours: list[Speed] = []
    theirs: list[Speed] = []
    drafted = DraftedBench(engine) if engine.speculates else None
    for turn in range(args.repeats + 1):
        if drafted is not None:
            drafted.answer_off(lambda: answer_once(engine, next_prompt(), args.new_tokens), counts=turn > 0)
            if turn == 1:
                drafted.begin()
        prompt = next_prompt()
        mine = answer_once(engine, prompt, args.new_tokens)
        kept = len(prompt) - mine.prompt_tokens
        if 2 * kept < args.depth:
            raise ConfigError(
                f"--depth was given {args.depth}, of which the cache kept {kept} tokens: "
                "give more, or a larger --max-total-tokens"
            )
        reference_tokens = other.answer_once(prompt, args.new_tokens) if other is not None else None
        # The first round warms up caches and thread pools of both programs.
        if turn > 0:
            ours.append(mine)
            theirs += [reference_tokens] if reference_tokens is not None else []
    result: dict[str, Any] = {
        "model": engine.info.model,
        "accelerator": engine.info.accelerator,
        "output_changes": list(engine.info.output_changes),
        "cpu_isa": engine.info.cpu_isa,
        "cpu_threads": engine.info.cpu_threads,
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
        "twofold": median_speed(ours).as_json(),
        "shares": None,
        "transformers": None,
        "decode_ratio": None,
        "prefill_ratio": None,
        "decode_ratio_range": None,
        "prefill_ratio_range": None,
        "speculation": None if drafted is None else drafted.as_json(ours),
    }
    if other is not None:
        result["transformers"] = median_speed(theirs).as_json() | other.describe()
        pairs = list(zip(ours, theirs, strict=True))
        for kind in ("prefill", "decode"):
            figure = f"{kind}_tokens_per_s"
            ratios = sorted(getattr(a, figure) / getattr(b, figure) for a, b in pairs)
            result[f"{kind}_ratio"] = statistics.median(ratios)
            result[f"{kind}_ratio_range"] = [ratios[0], ratios[-1]]
    return result


def tests_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A result's figures one by one, with the names that llama.cpp's benchmark gives them: "pp512", "tg32 @ d16384"."""
    named = (("pp", "prompt_tokens", "prefill"), ("tg", "new_tokens", "decode"))
    after = f" @ d{result['depth']}" if result["depth"] else ""
    return [
        {
            "engine": engine,
            "test": f"{prefix}{result[length]}{after}",
            "prompt_tokens": result["prompt_tokens"],
            "depth": result["depth"],
            "tokens_per_s": result[engine][f"{figure}_tokens_per_s"],
        }
        for engine in ("twofold", "transformers")
        if result[engine] is not None
        for prefix, length, figure in named
    ]


def answer_once(engine: Engine, prompt: list[int], new_tokens: int) -> Speed:
    """Time one greedy answer of exactly `new_tokens` tokens, by the wall clock and by the engine's own clock."""
    times: list[float] = []
    chunks: list[Chunk] = []

    def on_chunk(chunk: Chunk) -> None:
        now = time.perf_counter()
        times.extend([now] * len(chunk.token_ids))
        chunks.append(chunk)

    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    begun = time.perf_counter()
    usage = engine.generate(tuple(prompt), sampling, on_chunk)
    if chunks and chunks[-1].error:
        raise KernelError(chunks[-1].error)
    if len(times) < new_tokens:
        raise ConfigError(
            f"--new-tokens was given {new_tokens}; with this prompt the context holds {len(times)}"
        )
    if times[-1] == times[0]:
        raise ConfigError(
            f"--new-tokens was given {new_tokens}; these tokens of the answer are parts of one character, which comes "
            "at once: give more"
        )
    read = len(prompt) - usage.cached_tokens
    return Speed(read, new_tokens, times[0] - begun, times[-1] - times[0], usage=usage)


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    rows = [("", "prefill tokens/s", "decode tokens/s")]
    for name in ("twofold", "transformers"):
        speed = result[name]
        if speed is not None:
            rows.append((name, f"{speed['prefill_tokens_per_s']:.1f}", f"{speed['decode_tokens_per_s']:.1f}"))
    if result["decode_ratio"] is not None:
        # Not the quotient of the rows above: rounds alternate, so that clock drift of the machine slows both alike.
        rows.append(
            ("ratio by round", _ratio_and_range(result, "prefill"), _ratio_and_range(result, "decode"))
        )
    after = f" after {result['depth']}" if result["depth"] else ""
    lines = [
        f"{result['model']} on {result['accelerator']} ({result['cpu_isa']}, {result['cpu_threads']} threads), "
        f"{result['prompt_tokens']} + {result['new_tokens']} tokens{after}, median of {result['repeats']}",
        *(f"  {a:<14}{b:>22}{c:>22}" for a, b, c in rows),
        *(f"  note: {text}" for text in result["output_changes"]),
    ]
    if result["speculation"]:
        lines += drafted_lines(result["speculation"])
    if shares := result["shares"]:
        for name in ("of_read", "of_products"):
            prefill, decode = (f"{shares[step][name]:.0%}" for step in ("prefill", "decode"))
            lines.append(f"  {name.replace('_', ' '):<14}{prefill:>22}{decode:>22}")
        lines.append(
            f"  bytes the model must read: {shares['prefill']['gb']:.2f} GB for the prompt, "
            f"{shares['decode']['gb']:.3f} GB for a decoded token"
        )
    clock = result["twofold"]["clock"]
    if clock["name"] == "virtual":
        lines.append(
            f"  on the virtual clock of the emulated GPU: prefill {clock['prefill_tokens_per_s']:.1f}, "
            f"decode {clock['decode_tokens_per_s']:.1f} tokens/s (the rows above are wall-clock times)"
        )
    if result["transformers"] is None:
        lines.append(f"  not compared with transformers: {result['not_compared_because']}")
    return "\n".join(lines)


def _ratio_and_range(result: dict[str, Any], kind: str) -> str:
    low, high = result[f"{kind}_ratio_range"]
    return f"{result[f'{kind}_ratio']:.2f} ({low:.2f}-{high:.2f})"


def _weights_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def _whether_to_compare(args: argparse.Namespace, directory: Path) -> tuple[bool, str]:
    """The decision and, if it is no, its reason. ConfigError if a comparison was requested and is impossible."""
    requested = args.compare_transformers
    if args.depth > 0:
        if requested:
            raise ConfigError("--compare-transformers cannot be given with --depth: it keeps no context")
        return False, "--depth was given"
    installed = importlib.util.find_spec("transformers") is not None
    if requested and not installed:
        raise ConfigError(
            "--compare-transformers needs transformers; install it with: pip install 'twofold[dev]'"
        )
    if requested is not None:
        return requested, "--no-compare-transformers"
    size = _weights_bytes(directory)
    if not installed:
        return False, "it is not installed"
    return size < _COMPARE_BYTES, f"the weights are {size / 1024**3:.1f} GiB; ask with --compare-transformers"
