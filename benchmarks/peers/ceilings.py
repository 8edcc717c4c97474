"""The machine's measured ceilings, and the tokens per second that they allow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.engines import PeerError, last_json_lines
from benchmarks.peers.gguf_model import read_per_token
from benchmarks.peers.shapes import FULL_SHAPES

_PROGRAM: Final = Path(__file__).resolve().parents[2] / "kernels" / "bench" / "ceilings.py"

# Which arithmetic a format's products are made of: 8-bit integers unless it is named here.
ARITHMETIC: Final = {"f32": "f32", "f16": "f32", "bf16": "bf16"}


def measure(threads: int, python: str) -> dict[str, float]:
    """Rates that kernels/bench/ceilings.py measures on so many threads at TWOFOLD_ISA's level. Raises PeerError."""
    lines = last_json_lines(
        [python, str(_PROGRAM), "--threads", str(threads)], "kernels/bench/ceilings.py", "make build"
    )
    if not lines or not isinstance(lines[-1], dict):
        raise PeerError("kernels/bench/ceilings.py printed no result")
    return {str(name): float(value) for name, value in lines[-1].items() if name.endswith("_per_s")}


def arithmetic(ceilings: Mapping[str, float], format_name: str) -> float | None:
    """10^9 operations per second of the fastest products that this CPU has for a format; None: not measured."""
    kind = ARITHMETIC.get(format_name, "int8")
    rates = [ceilings[name] for name in (f"{kind}_gop_per_s", f"{kind}_tiles_gop_per_s") if name in ceilings]
    return max(rates, default=None)


def bounds(report: Mapping[str, Any], format_name: str) -> dict[str, float]:
    """tokens/s that memory (tg: every weight read once) and arithmetic (pp) allow; what is unknown is left out."""
    ceilings = report["ceilings"]
    shape = FULL_SHAPES[report["shape"]].with_layers(report["layers"])
    weights, num_bytes = read_per_token(shape, format_name)
    found = {}
    if ceilings.get("read_gb_per_s"):
        found["tg"] = ceilings["read_gb_per_s"] * 1e9 / num_bytes
    rate = arithmetic(ceilings, format_name)
    if rate:
        # The output layer runs for the last token of a prompt only.
        per_token = 2 * (weights - shape.vocab * shape.hidden)
        found["pp"] = rate * 1e9 / per_token
    return found
