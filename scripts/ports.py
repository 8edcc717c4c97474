#!/usr/bin/env python3
"""Checks the ports of `make run` before anything is installed: standard library alone.

Exit code: 0, or 2 with one line that says what was given, what was expected and what to do.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Mapping

HOST = "127.0.0.1"
MAX_PORT = 65535


def port_problem(given: Mapping[str, str]) -> str:
    """Error of the ports, by the names of their variables; "" if all can be used."""
    for name, text in given.items():
        if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_PORT:
            return f"{name} was given {text!r}; expected a port from 1 to {MAX_PORT}"
        if not port_is_free(int(text)):
            free = next((port for port in range(int(text) + 1, MAX_PORT + 1) if port_is_free(port)), 10002)
            return f"port {text} is in use; choose another: make run {name}={free}"
    if len(set(map(int, given.values()))) < len(given):
        return f"{' and '.join(given)} were both given {next(iter(given.values()))}; expected two ports"
    return ""


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two ports as text: `port_problem` reports a wrong one by the name that `make run` gives it."""
    parser.add_argument("--port", default="10002")
    parser.add_argument("--dashboard-port", default="8501")


def named(args: argparse.Namespace) -> dict[str, str]:
    """The ports by the names of their variables in the Makefile."""
    return {"PORT": args.port, "DASHBOARD_PORT": args.dashboard_port}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    problem = port_problem(named(parser.parse_args()))
    if problem:
        print(problem, file=sys.stderr)
    return 2 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
