"""Sweeps of the lab: every combination of the swept options, one after the other or as tasks on Ray."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from twofold.api.errors import ConfigError

Row = dict[str, Any]
Cell = Callable[[argparse.Namespace], list[Row]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a sweep on Ray."""
    parser.add_argument(
        "--ray",
        action="store_true",
        help="run each combination as a task on Ray (needs twofold[ray]); files must be readable on every machine",
    )
    parser.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="Ray cluster of --ray: auto, or HOST:PORT of its head (default: start one on this machine)",
    )


def swept(cell: Cell, args: argparse.Namespace, axes: Sequence[str]) -> list[Row]:
    """The rows of every combination of the values of `axes`, in the order of the axes, the last one fastest.

    cell: the rows for arguments whose axes have one value each. A module's function, because Ray sends its name.
    """
    cells = [
        argparse.Namespace(
            **{**vars(args), **{name: [value] for name, value in zip(axes, values, strict=True)}}
        )
        for values in product(*(getattr(args, name) for name in axes))
    ]
    if not args.ray:
        return [row for each in cells for row in cell(each)]
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"--ray was given, but Ray cannot be imported ({error}); install twofold[ray]"
        ) from None
    ray.init(address=args.ray_address or "local", include_dashboard=False, log_to_driver=False)
    try:
        task = ray.remote(cell)
        return [row for rows in ray.get([task.remote(each) for each in cells]) for row in rows]
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise error.cause from None
        raise
    finally:
        ray.shutdown()
