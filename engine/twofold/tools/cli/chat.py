"""`twofold chat`: talk with a model in the terminal, or through a pipe (one line in, one answer out)."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from twofold.api.errors import ConfigError, RequestError
from twofold.api.types import SamplingParams
from twofold.text.conversation.arranging import rendered
from twofold.tools.cli.answer_reader import read_answer
from twofold.tools.cli.model_options import (
    add_model_arguments,
    add_sampling_arguments,
    emulation_notice,
    engine_config,
    running_engine,
    sampling_from,
)
from twofold.tools.cli.parser import ShortHelp
from twofold.tools.cli.terminal_text import print_piece

if TYPE_CHECKING:
    from twofold.engine import Engine

_HELP = """\
  /reset   forget the conversation
  /help    this list
  Ctrl-C   stop the answer        Ctrl-D   leave"""

_LEAST_ROOM = 64
"""Tokens kept free for an answer: the oldest turns are dropped before the context is fuller than this."""


SHORT_HELP: Final = ShortHelp(
    (
        *("--system", "--temperature", "--top-p", "--top-k", "--min-p", "--max-tokens"),
        *(
            "--accelerator",
            "--gpu-experts-ratio",
            "--max-model-len",
            "--cpu-threads",
            "--kv-cache-dtype",
            "--seed",
        ),
    ),
    (
        ("chat", "the bundled demonstration model"),
        ("chat ~/models/Qwen3-30B-A3B", "a model on disk"),
        (
            "chat ~/models/model.gguf --system 'Answer briefly.' --temperature 0",
            "greedy, with a system message",
        ),
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", help="system message at the start of the conversation")
    add_sampling_arguments(parser)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from twofold.server.bridge.models.sampling_defaults import sampling_defaults

    config = engine_config(args)
    sampling = sampling_from(args, sampling_defaults(Path(config.model)))
    with running_engine(args, config) as engine:
        if not engine.tokenizer.has_chat_template:
            raise ConfigError(f"{config.model} has no chat template; use: twofold generate --raw --prompt …")
        Conversation(engine, sampling, args.system).run()
    return 0


class Conversation:
    """The turns so far and the loop that adds to them."""

    def __init__(self, engine: Engine, sampling: SamplingParams, system: str | None) -> None:
        self._engine = engine
        self._sampling = sampling
        self._system = [{"role": "system", "content": system}] if system else []
        self._turns: list[dict[str, str]] = []
        self._interactive = sys.stdin.isatty()

    def run(self) -> None:
        """Run until the end of the input."""
        if self._interactive:
            # Line editing and history for input(); missing in a few Python builds.
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401
            print(f"{Path(self._engine.info.model).name} on {self._engine.info.accelerator}\n{_HELP}")
            notice = emulation_notice(self._engine.info.accelerator)
            if notice:
                print(notice)
            for text in self._engine.info.output_changes:
                print(f"note: {text}")
        while True:
            try:
                line = input("\n> " if self._interactive else "").strip()
            except EOFError:
                if self._interactive:
                    print()
                return
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print("\n(Ctrl-D leaves)")
                continue
            except UnicodeDecodeError:
                raise ConfigError("standard input is not UTF-8 text; chat reads text only") from None
            if line:
                self._obey(line)

    def _obey(self, line: str) -> None:
        if line == "/reset":
            self._turns.clear()
            print("(forgotten)")
        elif line == "/help":
            print(_HELP)
        elif line.startswith("/"):
            print(f"(there is no {line.split()[0]}; /help lists what there is)")
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        """Print the answer as it streams; keep the turn in the history, even if the answer was stopped."""
        self._turns.append({"role": "user", "content": line})
        reply = ""
        try:
            for chunk in read_answer(self._engine, self._prompt(), self._sampling, endpoint="chat"):
                print_piece(chunk.text)
                reply += chunk.text
            print()
        except KeyboardInterrupt:
            print(" … (stopped)")
        except RequestError as error:
            self._turns.pop()
            print(f"({error})")
            return
        self._turns.append({"role": "assistant", "content": reply})

    def _prompt(self) -> list[int]:
        """The conversation as tokens, without its oldest turns if the context is too small for all."""
        tokenizer = self._engine.tokenizer
        forgotten = 0
        while True:
            _, prompt = rendered(self._system + self._turns, tokenizer, tokenizer.apply_chat_template)
            token_ids = tokenizer.encode(prompt)
            fits = len(token_ids) + _LEAST_ROOM <= self._engine.max_context
            if fits or len(self._turns) < 3:
                break
            del self._turns[:2]
            forgotten += 2
        if forgotten:
            print(f"(the context is full: dropped the {forgotten} oldest turns)")
        return token_ids
