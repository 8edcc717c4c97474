"""The parser of all commands: one-line errors with the nearest name, a short help and one with all flags.

By argparse and as plain text; docs/notebook/setup.md compares it with typer and rich-argparse.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, NoReturn

_HIDDEN: Final = argparse.SUPPRESS


class ShortHelp(NamedTuple):
    """What `--help` shows of a command with many flags; `--help-all` shows the rest."""

    flags: tuple[str, ...]
    examples: tuple[tuple[str, str], ...]
    """Command lines without `twofold`, each with what it does."""


class OneLineParser(argparse.ArgumentParser):
    """Reports errors in one line, without the usage; accepts flags with underscores as with dashes."""

    short_help: ShortHelp | None = None

    def set_short_help(self, short: ShortHelp) -> None:
        """Let --help show `short`, and --help-all everything."""
        self.short_help = short
        self.add_argument(
            "--help-all", action=_HelpAllAction, nargs=0, default=_HIDDEN, help="show all flags, and exit"
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, but accepts flags with underscores, as KTransformers and vLLM do, and refuses unknown ones here,
        where the command's own flags are known."""
        given = sys.argv[1:] if args is None else args
        found, unknown = super().parse_known_args([self._dashed(argument) for argument in given], namespace)
        if unknown:
            self.error(self._unknown(unknown))
        return found, unknown

    def _dashed(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        known, dashed = self._option_string_actions, name.replace("_", "-")
        return dashed + equals + value if name not in known and dashed in known else argument

    def _unknown(self, arguments: list[str]) -> str:
        flags = [each.partition("=")[0] for each in arguments if each.startswith("-")]
        if not flags:
            return f"unrecognized arguments: {' '.join(arguments)}"
        nearest = _nearest(flags[0].replace("_", "-"), self._option_string_actions)
        return f"unknown flag {flags[0]}{nearest}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if not isinstance(action, argparse._SubParsersAction) or value in action.choices:
            super()._check_value(action, value)
            return
        nearest = _nearest(str(value), action.choices)
        known = (
            ""
            if nearest or len(action.choices) > 10
            else f"; it is one of {', '.join(map(repr, action.choices))}"
        )
        # argparse would add the argument's name, which is no help.
        self.error(f"there is no command {value!r}{nearest}{known}")

    def format_help(self) -> str:
        return self._help(self._all_groups() if self.short_help is None else self._common(self.short_help))

    def format_full_help(self) -> str:
        """The help of --help-all: every flag, by groups."""
        return self._help(self._all_groups())

    def _help(self, sections: Iterable[tuple[str, list[argparse.Action]]]) -> str:
        formatter = self._get_formatter()
        positionals = [action for action in self._actions if not action.option_strings]
        formatter.add_usage(self.usage, [*self._usage_flags(), *positionals], [])
        formatter.add_text(self.description)
        commands = any(isinstance(action, argparse._SubParsersAction) for action in positionals)
        for title, actions in [("commands" if commands else "arguments", positionals), *sections]:
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help() + self._examples()

    def _usage_flags(self) -> list[argparse.Action]:
        """The flags of the usage line: the required ones, or all where they are few."""
        flags = [action for action in self._actions if action.option_strings and action.help != _HIDDEN]
        if self.short_help is None and len(flags) <= 12:
            return flags
        any_flags = argparse.Action(["FLAGS"], "flags", nargs=0)
        return [any_flags, *(flag for flag in flags if flag.required)]

    def _all_groups(self) -> Iterable[tuple[str, list[argparse.Action]]]:
        for group in self._action_groups:
            yield group.title or "", [action for action in group._group_actions if action.option_strings]

    def _common(self, short: ShortHelp) -> Iterable[tuple[str, list[argparse.Action]]]:
        yield "common flags", [self._option_string_actions[flag] for flag in (*short.flags, "--help-all")]

    def _examples(self) -> str:
        if self.short_help is None:
            return ""
        width = max(len(line) for line, _ in self.short_help.examples)
        lines = (f"  twofold {line:<{width}}  # {what}\n" for line, what in self.short_help.examples)
        return "\nexamples:\n" + "".join(lines)


class _HelpAllAction(argparse._HelpAction):
    def __init__(self, option_strings: Any, dest: str = _HIDDEN, default: str = _HIDDEN, **rest: Any) -> None:
        super().__init__(option_strings, dest, default, help=rest.get("help"))

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, OneLineParser)
        parser._print_message(parser.format_full_help(), sys.stdout)
        parser.exit()


def _nearest(given: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" for a near miss, else ""."""
    import difflib  # only a mistake needs it

    found = difflib.get_close_matches(given, list(known), n=1, cutoff=0.7)
    return f"; did you mean {found[0]}?" if found else ""
