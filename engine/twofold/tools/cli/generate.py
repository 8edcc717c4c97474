"""`twofold generate`: one prompt, one answer."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from twofold.api.errors import ConfigError
from twofold.api.parallel_config import ParallelConfig
from twofold.api.settings import from_namespace
from twofold.api.types import Usage
from twofold.tools.cli.answer_reader import read_answer
from twofold.tools.cli.model_options import (
    add_model_arguments,
    add_sampling_arguments,
    emulation_notice,
    engine_config,
    load_started,
    running_engine,
    sampling_from,
)
from twofold.tools.cli.parser import ShortHelp
from twofold.tools.cli.picture_prompts import RenderedPrompt, picture_part, rendered_prompt
from twofold.tools.cli.serve.ranks import add_rank_arguments, load_on_ranks, run_on_ranks
from twofold.tools.cli.terminal_text import print_piece

if TYPE_CHECKING:
    from twofold.engine import Engine
    from twofold.parallel.session import Leader


SHORT_HELP: Final = ShortHelp(
    (
        *("--prompt", "--system", "--raw", "--json", "--max-tokens", "--temperature", "--top-p"),
        *("--accelerator", "--gpu-experts-ratio", "--max-model-len", "--cpu-threads", "--seed"),
    ),
    (
        ("generate --prompt 'Once upon a time'", "the bundled demonstration model"),
        ("generate ~/models/Qwen3-30B-A3B --prompt -  < question.txt", "a prompt from a file"),
        ("generate ~/models/model.gguf --prompt Hello --json", "for a program"),
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt",
        help="prompt to answer; -, or left out if standard input is a pipe or file: read it from there",
    )
    parser.add_argument("--system", help="system message before the prompt")
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is, without the model's chat template"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object with the text, where experts ran, and times",
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="picture shown before the prompt; may be given several times",
    )
    add_sampling_arguments(parser)
    add_rank_arguments(parser)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if from_namespace(ParallelConfig, args).tensor_parallel_size > 1:
        return run_on_ranks(args, lambda leader: _answer(args, leader))
    return _answer(args)


def _answer(args: argparse.Namespace, leader: Leader | None = None) -> int:
    """Answer the prompt. leader: rank 0, if other processes hold parts of the weights."""
    from twofold.server.bridge.models.sampling_defaults import sampling_defaults

    config = engine_config(args)
    prompt = read_prompt(args.prompt)
    sampling = sampling_from(args, sampling_defaults(Path(config.model)))
    texts: list[str] = []
    answer_ids: list[int] = []
    load = load_started if leader is None else partial(load_on_ranks, leader=leader)
    with running_engine(args, config, load) as engine:
        notice = emulation_notice(engine.info.accelerator)
        if not args.json:
            for text in (*([notice] if notice else []), *(f"note: {t}" for t in engine.info.output_changes)):
                print(text, file=sys.stderr)
        made = rendered_or_raw(engine, prompt, args.system, raw=args.raw, images=args.image)
        usage = Usage(len(made.token_ids), 0)
        for chunk in read_answer(engine, made.token_ids, sampling, endpoint="generate", media=made.media):
            texts.append(chunk.text)
            answer_ids += chunk.token_ids
            usage = chunk.usage or usage
            if not args.json:
                print_piece(chunk.text)
    # After closing: only then are the last step's counts complete.
    if args.json:
        print(json.dumps(report(engine, "".join(texts), answer_ids, usage), ensure_ascii=False))
    else:
        print()
    return 0


def read_prompt(given: str | None) -> str:
    """The prompt itself; stdin for "-", or for None if stdin is not a terminal. ConfigError if there is none."""
    if given is None and sys.stdin.isatty():
        raise ConfigError("no prompt was given; use --prompt TEXT, or pipe one in")
    source = "standard input" if given in (None, "-") else "--prompt"
    try:
        text = sys.stdin.read() if given is None or given == "-" else given
    except UnicodeDecodeError:
        raise ConfigError("standard input is not UTF-8 text; a prompt is text") from None
    # Some editors begin a file with a byte-order mark; it is dropped.
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise ConfigError(f"{source} is empty; give at least one word")
    return text


def rendered_or_raw(
    engine: Engine, prompt: str, system: str | None, *, raw: bool = False, images: Sequence[str] = ()
) -> RenderedPrompt:
    """The prompt through the chat template, or unchanged (`raw`, or a model without a template). images: files."""
    tokenizer = engine.tokenizer
    if raw or not tokenizer.has_chat_template:
        if system or images:
            given = "--system" if system else "--image"
            raise ConfigError(f"{given} needs a chat template; leave --raw or {given} out")
        return RenderedPrompt(tokenizer.encode(prompt, add_special_tokens=True), prompt, None)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    parts = [picture_part(Path(each).expanduser()) for each in images]
    content = [*parts, {"type": "text", "text": prompt}] if parts else prompt
    return rendered_prompt(engine, [*messages, {"role": "user", "content": content}])


def report(engine: Engine, text: str, token_ids: list[int], usage: Usage) -> dict[str, Any]:
    """The JSON of --json. Rates are null where they are undefined (fewer than two tokens)."""
    # The first token comes from the prefill; decode_s covers the others.
    decoded = usage.completion_tokens - 1
    rate = decoded / usage.decode_s if decoded > 0 and usage.decode_s > 0 else None
    return {
        "text": text,
        "token_ids": token_ids,
        "accelerator": engine.info.accelerator,
        "output_changes": list(engine.info.output_changes),
        "placement": dataclasses.asdict(engine.stats().placement),
        "timings": {
            "clock": usage.clock,
            "prefill_ms": usage.prefill_s * 1e3,
            "decode_ms": usage.decode_s * 1e3,
            "decode_tokens_per_s": rate,
        },
        "usage": {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens},
    }
