#!/usr/bin/env python3
"""Starts the OpenAI server and the dashboard together and ends them together: what `make run` calls.

Each child has its own process group, so that Ctrl-C in the terminal reaches only this script, which then asks both to
end (the server drains its running requests first). When one child exits, the other is ended too. If this script is
killed, the kernel sends the children SIGTERM. Exit code: 0 after Ctrl-C or SIGTERM, 2 for a bad setting, else that of
the child that exited first (1 if that was 0).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from twofold.api.addresses import without_password
from twofold.experts.unused_gpu import has_gpu

from scripts.ports import HOST, add_arguments, named, port_problem

ROOT = Path(__file__).resolve().parent.parent
EMULATED = ("emulated:rtx4090-pcie4", "0.25")
# In a process of its own: it may import torch and open the GPU, whose memory this script would keep.
WHY_GPU_IS_UNUSED = """
from twofold.device.finding import choose_accelerator
choice, _ = choose_accelerator("auto")
print(choice.reason if choice.unused_gpu else "")
"""
START_TIMEOUT_S = 600.0
END_TIMEOUT_S = 40.0
"""Longer than the server's own drain timeout."""


class StopError(Exception):
    """A signal asked this script to end."""


def main() -> int:
    args = parse_arguments()
    problem = port_problem(named(args))
    if problem:
        print(problem, file=sys.stderr)
        return 2

    telemetry_url = os.environ.get("TWOFOLD_TELEMETRY_URL") or f"sqlite:///{ROOT / 'twofold.db'}"
    environment = dict(os.environ, TWOFOLD_TELEMETRY_URL=telemetry_url, PYTHONUNBUFFERED="1")
    serve, dashboard = commands(args, telemetry_url)

    def on_signal(_number: int, _frame: object) -> None:
        raise StopError

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGHUP, on_signal)
    children: dict[str, subprocess.Popen[bytes]] = {}
    try:
        children["server"] = start(serve, environment)
        health = wait_until_up(children, "server", f"http://{HOST}:{args.port}/health")
        if health is None:
            return ended_early(children)
        # Streamlit prints its own addresses on stdout; ours are printed below.
        children["dashboard"] = start(dashboard, environment, quiet=True)
        if (
            wait_until_up(children, "dashboard", f"http://{HOST}:{args.dashboard_port}/_stcore/health")
            is None
        ):
            return ended_early(children)
        greet(args, telemetry_url)
        while all(exit_code(child) is None for child in children.values()):
            time.sleep(0.2)
        return ended_early(children)
    except StopError:
        print(
            "\nEnding the server and the dashboard (running answers may finish; Ctrl-C again ends at once) …",
            flush=True,
        )
        return 0
    finally:
        end(children)


def commands(args: argparse.Namespace, telemetry_url: str) -> tuple[list[str], list[str]]:
    """Command lines of the server and the dashboard."""
    accelerator, ratio = choose_accelerator(args)
    serve = [sys.executable, "-m", "twofold.tools.cli.main", "serve"]
    serve += [os.path.expanduser(args.model)] if args.model else []
    serve += ["--host", HOST, "--port", args.port, "--accelerator", accelerator]
    serve += ["--telemetry-url", telemetry_url]
    serve += ["--dashboard-url", f"http://{HOST}:{args.dashboard_port}"]
    serve += ["--gpu-experts-ratio", ratio] if ratio else []
    dashboard = [sys.executable, "-m", "twofold.tools.cli", "dashboard"]
    dashboard += ["--telemetry-url", telemetry_url, "--port", args.dashboard_port]
    return serve, dashboard


def choose_accelerator(args: argparse.Namespace) -> tuple[str, str]:
    """(--accelerator, --gpu-experts-ratio); reports an automatic choice."""
    if args.accelerator:
        return args.accelerator, args.ratio
    if has_gpu():
        reason = why_gpu_is_unused()
        if not reason:
            print("An NVIDIA GPU is here: --accelerator auto", flush=True)
            return "auto", args.ratio
        print(f"bad: {reason}", flush=True)
    else:
        print("No NVIDIA GPU is here.", flush=True)
    accelerator, default_ratio = EMULATED
    ratio = args.ratio or default_ratio
    print(
        f"This asks for --accelerator {accelerator} --gpu-experts-ratio {ratio}: experts are really moved, kept and\n"
        "evicted, but the CPU computes and GPU time is the cost model's (virtual clock). Answers, database and\n"
        "dashboard say so. For the CPU alone at full speed: make run ACCELERATOR=none",
        flush=True,
    )
    return accelerator, ratio


def why_gpu_is_unused() -> str:
    """Why --accelerator auto would not use this machine's GPU, and what to do; "" if it would."""
    command = [sys.executable, "-c", WHY_GPU_IS_UNUSED]
    requested = subprocess.run(command, capture_output=True, text=True, check=False)
    if requested.returncode == 0:
        return requested.stdout.strip()
    last = (requested.stderr.strip().splitlines() or [f"exit code {requested.returncode}"])[-1]
    return f"this GPU is not used, because looking for it failed ({last}); run `make doctor`"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--model", default="", help="model directory (default: the bundled one)")
    parser.add_argument("--accelerator", default="", help="default: auto with an NVIDIA GPU, else emulated")
    parser.add_argument("--ratio", default="", help="share of the experts that VRAM holds, 0.0-1.0")
    return parser.parse_args()


def start(command: list[str], environment: dict[str, str], *, quiet: bool = False) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def die_with_parent() -> None:
        pr_set_pdeathsig = 1
        libc.prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)

    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else None,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def wait_until_up(children: dict[str, subprocess.Popen[bytes]], name: str, url: str) -> str | None:
    """The body of the first 200 response of `url`; None if a child ended first or the time is over."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if any(exit_code(child) is not None for child in children.values()):
            return None
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
            urllib.request.urlopen(url, timeout=5) as answer,  # noqa: S310  http on 127.0.0.1
        ):
            return str(answer.read().decode())
        time.sleep(0.2)
    print(f"the {name} did not answer {url} within {START_TIMEOUT_S:.0f} s", file=sys.stderr)
    return None


def greet(args: argparse.Namespace, telemetry_url: str) -> None:
    base = f"http://{HOST}:{args.port}"
    print(
        f"\n  OpenAI API   {base}/v1\n"
        f"  Chat page    {base}\n"
        f"  Dashboard    http://{HOST}:{args.dashboard_port}\n"
        f"  Telemetry    {without_password(telemetry_url)}\n\n"
        f"  Try:  curl -N {base}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        '          -d \'{"model": "twofold-tales", "stream": true, "messages": [{"role": "user", '
        '"content": "Tell me the story of a clever fox."}]}\'\n\n'
        "  Ctrl-C ends both.\n",
        flush=True,
    )


def ended_early(children: dict[str, subprocess.Popen[bytes]]) -> int:
    for name, child in children.items():
        code = exit_code(child)
        if code is not None:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            print(f"the {name} {how}; ending the rest", file=sys.stderr)
            return code if code > 0 else 1
    return 1


def exit_code(child: subprocess.Popen[bytes]) -> int | None:
    """Exit code of a child that has ended, negative for a signal. Only `end` reaps, so that until then no other process
    or group gets a child's number."""
    found = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def end(children: dict[str, subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM to all, then SIGKILL to the groups of children that take too long, or on a second signal."""
    for child in children.values():
        os.kill(child.pid, signal.SIGTERM)
    try:
        deadline = time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < deadline and any(exit_code(child) is None for child in children.values()):
            time.sleep(0.05)
    except StopError:
        pass
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # no signal may interrupt the loop below
    for child in children.values():
        os.killpg(child.pid, signal.SIGKILL)  # including processes that a child left in its group
        child.wait()


if __name__ == "__main__":
    sys.exit(main())
