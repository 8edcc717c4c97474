"""An answer's text on a terminal as it streams: Markdown, of which the unfinished block is drawn again in place."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Final

from twofold.text.markdown.terminal import terminal_blocks
from twofold.tools.cli.terminal_text import harmless

_PAUSE_S: Final = 0.04
"""Between two drawings."""


class LiveMarkdown:
    """Markdown that grows. Finished blocks stay as they are; the last one's lines are replaced where they changed."""

    def __init__(self, *, styled: bool) -> None:
        self._styled = styled
        self._text = ""
        self._is_first = True
        self._drawn: list[str] = []
        """Lines of the unfinished block."""
        self._drawn_at_s = 0.0

    def add(self, text: str) -> None:
        self._text += harmless(text)
        if time.monotonic() - self._drawn_at_s >= _PAUSE_S:
            self._draw()

    def end(self) -> None:
        """Draw what is left."""
        self._draw()

    def _draw(self) -> None:
        self._drawn_at_s = time.monotonic()
        size = shutil.get_terminal_size()
        found = terminal_blocks(self._text, size.columns - 1, styled=self._styled)
        if not found:
            return
        if not self._is_first:
            found[0] = (found[0][0], ["", *found[0][1]])
        self._replace([line for _, lines in found for line in lines], size.lines)
        last_line, last = found[-1]
        if len(found) > 1:
            self._text = "\n".join(self._text.split("\n")[last_line:])
            self._is_first = False
            self._drawn = last

    def _replace(self, lines: list[str], height: int) -> None:
        """Write `lines` over the drawn ones. Lines above the top of the screen cannot be changed any more."""
        same = 0
        while same < min(len(lines), len(self._drawn)) and lines[same] == self._drawn[same]:
            same += 1
        up = min(len(self._drawn) - same, height - 1)
        same = len(self._drawn) - up
        moved = f"\x1b[{up}A\r\x1b[J" if up else ""
        sys.stdout.write(moved + "".join(f"{line}\n" for line in lines[same:]))
        sys.stdout.flush()
        self._drawn = lines


class Thinking:
    """A model's thinking: shown dimmed, or folded into a line that counts the seconds."""

    def __init__(self, *, shows: bool, styled: bool) -> None:
        self._shows, self._styled = shows, styled
        self._begun_s = time.monotonic()
        self._shown_s = -1
        self._any = False

    def add(self, text: str) -> None:
        if self._shows:
            text = harmless(text if self._any else text.lstrip())
            sys.stdout.write(f"\x1b[2m{text}\x1b[0m" if self._styled else text)
        elif (passed := int(time.monotonic() - self._begun_s)) > self._shown_s:
            self._shown_s = passed
            sys.stdout.write(f"\r(thinking, {passed} s)")
        self._any = True
        sys.stdout.flush()

    def end(self) -> None:
        """Close the thinking, before the answer begins."""
        if self._any:
            passed = time.monotonic() - self._begun_s
            folded = f"\r\x1b[K(thought for {passed:.1f} s; /think on shows it)\n"
            sys.stdout.write("\n\n" if self._shows else folded)
            sys.stdout.flush()
