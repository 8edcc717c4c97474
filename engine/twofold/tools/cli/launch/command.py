"""`twofold launch AGENT`: run a coding agent in this terminal on Twofold; starts a server if none runs.

The user's own configuration is neither read nor written: the agent gets its settings by environment, arguments and, if
it takes no others, a file in a folder of ours. The settings last as long as the agent's process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from twofold.api.config import DEFAULT_URL
from twofold.api.errors import CapacityError, ConfigError
from twofold.api.whole_file import whole_file
from twofold.tools.cli.launch.agent_models import check_model_to_serve, check_served_model
from twofold.tools.cli.launch.agents import (
    AGENTS,
    KEY_NAME,
    LEAST_CONTEXT,
    NO_KEY,
    Agent,
    Provider,
    Settings,
    local_proxy_settings,
)
from twofold.tools.loadgen.http_client import check_url
from twofold.tools.loadgen.server_process import serving

_ANSWER_S: Final = 30.0
_MASK: Final = "********"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Arguments after -- are passed to the agent: twofold launch codex -- exec 'explain this folder'"
    )
    parser.add_argument("agent", choices=tuple(AGENTS), help="agent to run; it must be installed")
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="model to serve if no server answers; it must be able to call tools, which the bundled model cannot "
        "(aider needs none)",
    )
    parser.add_argument(
        "--base-url",
        default=DEFAULT_URL,
        metavar="URL",
        help=f"address of the server (default: {DEFAULT_URL}). On this machine one is started there if none answers. "
        f"{KEY_NAME} is the key of a running server",
    )
    parser.add_argument(
        "--server-args",
        type=shlex.split,
        default=[],
        metavar="FLAGS",
        help='flags for the server that is started, e.g. --server-args="--accelerator none"',
    )
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=1800.0,
        metavar="S",
        help="seconds the model may take to load (default: 1800)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the planned actions, with keys masked, without starting or writing anything",
    )
    parser.add_argument(
        "--restore", action="store_true", help="remove the files that were written for this agent, and exit"
    )


def run(args: argparse.Namespace) -> int:
    agent, folder = AGENTS[args.agent], _folder() / args.agent
    if args.restore:
        return _restore(agent, folder)
    executable = shutil.which(agent.executable)
    if executable is None and not args.dry_run:
        raise ConfigError(f"{agent.executable!r} was not found on PATH; install the agent, or try --dry-run")
    url = check_url(args.base_url, flag="--base-url", allow_remote=True)
    key = os.environ.get(KEY_NAME) or ""
    server = _Server(url, key, agent.calls_tools)
    runs = server.phase() is not None
    command: list[str] = []
    if not runs:
        check_url(url, flag="--base-url", allow_remote=False)  # no server can be started on another machine
        server = _Server(url, key or secrets.token_urlsafe(24), agent.calls_tools)
        arguments = _serve_arguments(args, url)
        if agent.calls_tools:
            check_model_to_serve(arguments)
        command = [sys.executable, "-m", "twofold.tools.cli", "serve", *arguments]
    if args.dry_run:
        provider = server.provider(args.model) if runs and server.phase() == "ready" else _guess(args, server)
        print(_plan(agent, provider, folder, executable=executable, command=command, rest=args.rest))
        return 0
    assert executable is not None, "it was found above"

    def prepared() -> tuple[list[str], dict[str, str]]:
        provider = server.provider(args.model)
        if warning := _short_context(provider):
            print(warning, file=sys.stderr)
        return _prepared(executable, agent.settings(provider, folder), folder, args.rest)

    if runs:
        server.wait(args.start_timeout)
        argv, environment = prepared()
        sys.stdout.flush()
        os.execve(executable, argv, environment)  # noqa: S606  the user's command
    with _own_server(command, server, args.start_timeout):
        argv, environment = prepared()
        return _run_agent(executable, argv, environment)


# ---- the server -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Server:
    url: str
    key: str
    needs_tools: bool

    def phase(self) -> str | None:
        """ready, loading or draining; None if no server answers."""
        try:
            status, body = self._get("/ready")
        except (httpx.ConnectError, httpx.ConnectTimeout):
            return None
        except httpx.HTTPError as error:
            raise CapacityError(f"what answers at {self.url} is no model server: {error}") from None
        reported_phase = body.get("status") if isinstance(body, dict) else None
        # Other servers have no /ready.
        return str(reported_phase) if status == 503 and reported_phase else "ready"

    def wait(self, timeout_s: float) -> None:
        """Wait until it is ready. CapacityError when that takes longer, or the server exits."""
        with _Progress(f"waiting for the model at {self.url}") as progress:
            deadline = time.monotonic() + timeout_s
            while (phase := self.phase()) != "ready":
                if phase is None or time.monotonic() > deadline:
                    what = "went away" if phase is None else f"is still {phase} after {timeout_s:g} s"
                    raise CapacityError(f"the server at {self.url} {what}")
                progress.show(phase)
                time.sleep(0.5)

    def provider(self, requested_model: str | None) -> Provider:
        """The served model. ConfigError if it is not the requested one, cannot call tools, or the key is wrong."""
        try:
            status, body = self._get("/v1/models")
            if status in (401, 403):
                raise ConfigError(f"the server at {self.url} requires a key; set {KEY_NAME}")
            card = body["data"][0]
            if self.needs_tools:
                check_served_model(card, body, self.url)
            name, length = str(card["id"]), card.get("max_model_len")
        except (httpx.HTTPError, LookupError, TypeError, AttributeError) as error:
            raise CapacityError(f"{self.url}/v1/models does not list the served model: {error}") from None
        if requested_model is not None and _name_of(requested_model) != name:
            raise ConfigError(
                f"the server at {self.url} serves {name!r}, not {requested_model!r}; stop it, leave MODEL out, or give "
                "another --base-url"
            )
        return Provider(self.url, self.key or NO_KEY, name, length if isinstance(length, int) else None)

    def _get(self, path: str) -> tuple[int, Any]:
        """Status and JSON; None for an answer without JSON."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        # The user's proxies cannot reach this machine's servers.
        answer = httpx.get(self.url + path, headers=headers, timeout=_ANSWER_S, trust_env=False)
        try:
            return answer.status_code, answer.json()
        except (ValueError, RecursionError):
            return answer.status_code, None


def _serve_arguments(args: argparse.Namespace, url: str) -> list[str]:
    parts = urllib.parse.urlsplit(url)
    where = ["--host", parts.hostname or "127.0.0.1", "--port", str(parts.port or 80)]
    model = [args.model] if args.model else []
    return [*model, *where, *args.server_args]


@contextlib.contextmanager
def _own_server(command: list[str], server: _Server, timeout_s: float) -> Iterator[None]:
    """Run a server during the block, ready at its start. A separate session keeps Ctrl-C for the agent."""
    log = _folder() / "server.log"
    _private(log.parent)
    environment = os.environ | {KEY_NAME: server.key}
    with (
        _Progress("starting a server") as progress,
        serving(
            command,
            log,
            timeout_s=timeout_s,
            environment=environment,
            new_session=True,
            while_waiting=lambda: progress.show(server.phase() or "starting"),
        ),
    ):
        progress.clear()
        yield


def _guess(args: argparse.Namespace, server: _Server) -> Provider:
    """For a plan: what a server that is not running yet would serve."""
    from twofold.models.bundled import bundled_model_path  # imports torch

    return Provider(server.url, server.key or NO_KEY, _name_of(args.model or str(bundled_model_path())))


def _name_of(model: str) -> str:
    from twofold.tools.cli.hub.model_path import served_name  # takes a second to import

    return served_name(model)


# ---- the agent ------------------------------------------------------------------------------------------------------


def _prepared(
    executable: str, settings: Settings, folder: Path, rest: list[str]
) -> tuple[list[str], dict[str, str]]:
    """The agent's command line and environment; writes its configuration files, if it reads any."""
    environment = {name: value for name, value in os.environ.items() if name not in settings.unset}
    environment |= _own_variables(settings)
    for name, content in settings.files.items():
        _private((folder / name).parent)
        # Only its owner can read it.
        with whole_file(folder / name, mode=0o600) as part:
            part.write_text(content, encoding="utf-8")
    return [executable, *settings.arguments, *rest], environment


def _own_variables(settings: Settings) -> dict[str, str]:
    return dict(settings.environment) | local_proxy_settings(os.environ)


def _short_context(provider: Provider) -> str:
    """The warning of a context that is too short for agents; else empty."""
    length = provider.max_model_len
    if length is None or length >= LEAST_CONTEXT:
        return ""
    return (
        f"warning: {provider.model} is served with a context of {length} tokens; an agent's first request alone takes "
        f"10,000 to 25,000, so serve with --max-model-len {LEAST_CONTEXT} or more"
    )


def _run_agent(executable: str, argv: list[str], environment: Mapping[str, str]) -> int:
    """Run until the agent ends; returns its exit code. It handles signals itself, so the server is always ended."""
    process = subprocess.Popen(argv, executable=executable, env=dict(environment))  # noqa: S603  the user's agent
    # The terminal sends Ctrl-C to both; unlike SIG_IGN, a handler is not inherited.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGQUIT)}
    for number in (signal.SIGTERM, signal.SIGHUP):
        before[number] = signal.signal(number, lambda number, _: process.send_signal(number))
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


# ---- our folder -----------------------------------------------------------------------------------------------------


def _folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "twofold" / "launch"


def _private(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def _restore(agent: Agent, folder: Path) -> int:
    """Remove the files that this agent's settings have."""
    names = agent.settings(Provider("http://127.0.0.1", NO_KEY, "any", LEAST_CONTEXT), folder).files
    written = [folder / name for name in names if (folder / name).exists()]
    for file in written:
        file.unlink()
        print(f"removed {file}")
    if not written:
        print("nothing to remove: no file was written for this agent")
    return 0


# ---- output ----------------------------------------------------------------------------------------------------------


def _plan(
    agent: Agent,
    provider: Provider,
    folder: Path,
    *,
    executable: str | None,
    command: list[str],
    rest: list[str],
) -> str:
    """The planned actions as text, with the key masked everywhere."""
    settings, name = agent.settings(provider, folder), agent.executable
    own_key = f"{KEY_NAME}={_MASK} " if command else ""
    lines = [
        f"server  start: {own_key}{shlex.join(command)}"
        if command
        else f"server  runs at {provider.base_url}",
        f"model   {provider.model}",
        *([warning] if (warning := _short_context(provider)) else []),
        f"agent   {executable or f'{name}: not found on PATH'}",
        *(f"unset   {variable}" for variable in settings.unset),
    ]
    for variable, value in _own_variables(settings).items():
        lines.append(f"set     {variable}={shlex.quote(value)}")
    for file, content in settings.files.items():
        lines.append(f"write   {folder / file}")
        lines += [f"        {line}" for line in content.splitlines()]
    lines.append(f"run     {shlex.join([executable or name, *settings.arguments, *rest])}")
    text = "\n".join(lines)
    return text if provider.api_key == NO_KEY else text.replace(provider.api_key, _MASK)


class _Progress:
    """One line on stderr: rewritten in place on a terminal, else printed once."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begun_s = time.monotonic()
        self._shows = sys.stderr.isatty()
        self._has_printed = False

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self, phase: str) -> None:
        if self._shows:
            passed = time.monotonic() - self._begun_s
            print(f"\r{self._what}: {phase}, {passed:.0f} s\x1b[K", end="", file=sys.stderr, flush=True)
        elif not self._has_printed:
            print(f"{self._what} …", file=sys.stderr, flush=True)
        self._has_printed = True

    def clear(self) -> None:
        if self._shows and self._has_printed:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
