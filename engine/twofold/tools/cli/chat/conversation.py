"""The conversation of `twofold chat`: its turns, the commands that begin with /, and how answers are shown."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from twofold.api.errors import CapacityError, ConfigError, ModelLoadError, RequestError
from twofold.api.regular_file import read_regular_text
from twofold.api.sampling_ranges import SAMPLING_RANGES
from twofold.api.whole_file import whole_file
from twofold.tools.cli.chat.sources import Source, Summary
from twofold.tools.cli.chat.typing_line import message_reader
from twofold.tools.cli.model_options import MAX_TOKENS, SAMPLING
from twofold.tools.cli.number_options import within
from twofold.tools.cli.picture_prompts import picture_part
from twofold.tools.cli.terminal_text import print_piece

HELP: Final = """\
  /reset             forget the conversation
  /system [TEXT]     show the system message, or set it; /system none removes it
  /set [NAME VALUE]  show sampling, or set temperature, top_p, top_k, min_p, max_tokens
                     (VALUE default: as the model declares)
  /image FILE        show a picture with the next message
  /think on|off      show thinking, or fold it
  /model [NAME]      list the models, or change to another
  /save FILE         write the conversation to a file
  /load FILE         go on with a conversation from a file
  /help              this list
  Ctrl-C   stop the answer        Alt-Enter   new line        Ctrl-D   leave"""


class Conversation:
    """The turns so far and the loop that adds to them."""

    def __init__(self, source: Source, sampling: Mapping[str, Any], system: str | None) -> None:
        """sampling: the user's values by name; the model's own are used for the others."""
        self._source = source
        self._sampling = dict(sampling)
        self._system = system or ""
        self._turns: list[dict[str, Any]] = []
        self._pictures: list[dict[str, Any]] = []
        """Pictures of the next message."""
        self._interactive = sys.stdin.isatty()
        self._shows_thinking = False
        self._read = message_reader()
        self._commands: dict[str, Callable[[str], str]] = {
            "/reset": self._reset,
            "/system": self._set_system,
            "/set": self._set,
            "/think": self._think,
            "/model": self._model,
            "/image": self._image,
            "/save": self._save,
            "/load": self._load,
        }

    def run(self) -> None:
        """Run until the end of the input."""
        while True:
            try:
                message = self._read().strip()
            except EOFError:
                if self._interactive:
                    print()
                return
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print("\n(Ctrl-D leaves)")
                continue
            if message:
                self._obey(message)

    def _obey(self, message: str) -> None:
        name, _, rest = message.partition(" ")
        if message == "/help":
            print(HELP)
        elif name in self._commands:
            try:
                print(f"({self._commands[name](rest.strip())})")
            except (ConfigError, CapacityError, OSError) as error:
                print(f"({error})")
        # A message may begin with a path, such as /etc/fstab.
        elif message.startswith("/") and name[1:].isalpha():
            print(f"(there is no {name}; /help lists what there is)")
        else:
            self._answer(message)

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _reset(self, _: str) -> str:
        self._turns.clear()
        self._pictures.clear()
        return "forgotten"

    def _set_system(self, text: str) -> str:
        if text:
            self._system = "" if text == "none" else text
        return f"system message: {self._system}" if self._system else "no system message"

    def _set(self, text: str) -> str:
        name, _, value = text.partition(" ")
        name = name.replace("-", "_")
        if text:
            if name not in SAMPLING or not value:
                raise ConfigError(f"/set takes one of {', '.join(SAMPLING)} and a value")
            if value.strip() == "default":
                self._sampling.pop(name, None)
            else:
                read = within(SAMPLING[name][0], SAMPLING_RANGES.get(name, MAX_TOKENS))
                try:
                    self._sampling[name] = read(value.strip())
                except Exception as error:  # argparse's, which a parser would catch
                    raise ConfigError(f"{name}: {error}") from None
        given = ", ".join(f"{name} {value:g}" for name, value in self._sampling.items())
        return f"sampling: {given or 'as the model declares'}"

    def _think(self, text: str) -> str:
        if text not in ("on", "off", ""):
            raise ConfigError("/think takes on or off")
        self._shows_thinking = {"on": True, "off": False}.get(text, self._shows_thinking)
        return f"thinking is {'shown' if self._shows_thinking else 'folded'}"

    def _model(self, name: str) -> str:
        if name:
            self._source.choose(name)
        others = [each for each in self._source.models if each != self._source.model]
        return f"model: {self._source.model}" + (f"; also {', '.join(others)}" if others else "")

    def _image(self, path: str) -> str:
        if not path:
            raise ConfigError("/image takes a file")
        self._pictures.append(picture_part(Path(path).expanduser()))
        count = len(self._pictures)
        return f"the next message shows {'the picture' if count == 1 else f'{count} pictures'}"

    def _save(self, path: str) -> str:
        if not path:
            raise ConfigError("/save takes a file")
        file = Path(path).expanduser()
        kept = {"model": self._source.model, "system": self._system, "messages": self._turns}
        with whole_file(file) as part:
            part.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return f"saved {len(self._turns)} messages to {file}"

    def _load(self, path: str) -> str:
        if not path:
            raise ConfigError("/load takes a file")
        file = Path(path).expanduser()
        try:
            kept = json.loads(read_regular_text(file))
            system = str(kept["system"])
            turns = [
                {"role": str(turn["role"]), "content": _content(turn["content"])} for turn in kept["messages"]
            ]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ConfigError(f"{file} is no conversation that /save wrote") from None
        self._system, self._turns = system, turns
        return f"loaded {len(turns)} messages from {file}"

    # ---- answers -----------------------------------------------------------------------------------------------------

    def _answer(self, message: str) -> None:
        """Print the answer as it streams; keep the turn in the history, even if the answer was stopped."""
        content = [*self._pictures, {"type": "text", "text": message}] if self._pictures else message
        self._turns.append({"role": "user", "content": content})
        system = [{"role": "system", "content": self._system}] if self._system else []
        shown = _Shown(shows_thinking=self._shows_thinking)
        answer = self._source.answer([*system, *self._turns], self._sampling)
        try:
            for piece in answer:
                if isinstance(piece, Summary):
                    shown.end()
                    if self._interactive:
                        print(f"({piece})")
                elif piece.kind == "note":
                    print(f"({piece.text})")
                else:
                    shown.add(piece.kind, piece.text)
        except KeyboardInterrupt:
            answer.close()
            shown.end()
            print("(stopped)")
        except (RequestError, CapacityError, ConfigError, ModelLoadError) as error:
            shown.end()
            print(f"({error})")
            if not shown.text:
                self._turns.pop()
                self._pictures.clear()
                return
        self._pictures.clear()
        self._turns.append({"role": "assistant", "content": shown.text})


def _content(value: Any) -> Any:
    """A saved turn's content: a text, or parts. ValueError for anything else."""
    if not isinstance(value, (str, list)):
        raise ValueError
    return value


class _Shown:
    """An answer on standard output: Markdown with folded thinking in a terminal, else its text alone."""

    def __init__(self, *, shows_thinking: bool) -> None:
        self.text = ""
        self._markdown: Any = None
        self._thinking: Any = None
        is_plain = not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb"
        if is_plain or importlib.util.find_spec("markdown_it") is None:
            return
        from twofold.tools.cli.chat.live_text import LiveMarkdown, Thinking

        styled = not os.environ.get("NO_COLOR")
        self._markdown = LiveMarkdown(styled=styled)
        self._thinking = Thinking(shows=shows_thinking, styled=styled)

    def add(self, kind: str, text: str) -> None:
        if kind == "content":
            self._end_thinking()
            self.text += text
        if self._markdown is None:
            if kind == "content":
                print_piece(text)
        elif kind == "content":
            self._markdown.add(text)
        else:
            self._thinking.add(text)

    def end(self) -> None:
        self._end_thinking()
        if self._markdown is None:
            print()
        else:
            self._markdown.end()

    def _end_thinking(self) -> None:
        if self._thinking is not None:
            self._thinking.end()
            self._thinking = None
