"""The page of real models on usual machines: what the automatic fit chooses, and the speed it predicts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from twofold.api.config import EngineConfig
from twofold.device.memory.budget import DeviceMemory
from twofold.experts.profiles import MachineProfile, load_profile
from twofold.fit.plan import FitPlan, Machine, plan_fit
from twofold.fit.speed import Speed, cpu_speed, device_speed, profile_rates
from twofold.models.model_files import ModelFiles, open_model_files

from benchmarks.models.gguf_model import write_model
from benchmarks.models.shapes import FULL_SHAPES, FullShape

_CONTEXT: Final = 4096
_FREE_SHARE: Final = 0.92
"""Share of a machine's memory that is available to the engine."""
_CARDS: Final = ("", "rtx3060-pcie3", "rtx4090-pcie4", "h200-pcie5")


@dataclass(frozen=True)
class RealModel:
    """A public model in the format in which it is usually served."""

    title: str
    name_form: str
    """With the title inserted, the name as `twofold serve` takes it."""
    shape: FullShape
    format: str
    memories_gib: tuple[int, ...]
    context: int
    """The model's own limit, in tokens."""

    @property
    def name(self) -> str:
        return self.name_form.format(self.title)


_OSS: Final = FULL_SHAPES["gpt-oss-120b"]
_OSS_20B: Final = replace(_OSS, name="gpt-oss-20b", layers=24, experts=32)
_GGUF: Final = "unsloth/{}-GGUF:Q4_K_M"
MODELS: Final = (
    RealModel("Qwen3-30B-A3B", _GGUF, FULL_SHAPES["qwen3-30b-a3b"], "q4_k", (16, 32), 40_960),
    RealModel("Qwen3-Next-80B-A3B-Instruct", _GGUF, FULL_SHAPES["qwen3-next-80b"], "q4_k", (32, 64), 262_144),
    RealModel("gpt-oss-20b", "openai/{}", _OSS_20B, "mxfp4", (16, 32), 131_072),
    RealModel("gpt-oss-120b", "openai/{}", _OSS, "mxfp4", (64, 96), 131_072),
    RealModel("GLM-4.5-Air", _GGUF, FULL_SHAPES["glm-4.5-air"], "q4_k", (64, 96), 131_072),
    RealModel("DeepSeek-V3", _GGUF, FULL_SHAPES["deepseek-v3"], "q4_k", (384, 512), 163_840),
)


def serve_a_real_model() -> str:
    """Body of the page."""
    intro = (
        "What the automatic fit chooses, and what it predicts. "
        "[Models by their name](../guides/models.md#models-by-their-name) explains the commands. "
        "`twofold fit MODEL` shows the same for your machine, by the same code.\n\n"
        "- Sizes come from the models' shapes, in one format throughout; published files mix formats.\n"
        f"- {_FREE_SHARE:.0%} of the memory count as free. All experts are in memory, those in VRAM too.\n"
        "- Speeds are predictions by the shipped machine profiles, for routing drawn by a Zipf law. They were measured "
        "on no such machine.\n"
        f"- Decode is at context {_CONTEXT}. Prefill leaves out attention's own products.\n"
        "- Without a card (`none`) the CPU is that of the profile rtx4090-pcie4.\n"
        "- More memory than the last row's changes nothing.\n"
        "- `serve` prints the server's address, which is also a chat page. Clients name the model as you did, or by "
        "its file. [Run a server](../guides/serving.md) has the first request."
    )
    return "\n\n".join([intro, *(_section(model) for model in MODELS)])


def _section(model: RealModel) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, replace(model.shape, context=model.context), model.format, is_sparse=True)
        files = open_model_files(path)
        rows = [row for gib in model.memories_gib for row in _rows(files, gib)]
    head = "| memory | accelerator | context | KV cache | experts in VRAM | decode, tokens/s | prefill, tokens/s |"
    given = f"pip install 'twofold[server,hub]'\ntwofold pull {model.name}\ntwofold serve {model.name}"
    commands = f"<!-- not run: download -->\n```sh\n{given}\n```"
    return "\n".join(
        [f"## {model.title}\n", commands, "", f"Format {model.format}.\n", head, "|" + "---|" * 7, *rows]
    )


def _rows(files: ModelFiles, gib: int) -> Iterator[str]:
    """One row per card; a single one if the weights do not fit into memory."""
    for card in _CARDS:
        plan, speed = fit_of(files, gib, card)
        label = f"| {gib} GiB | {card or 'none'} |"
        if not plan.fits and not card:
            yield f"| {gib} GiB | any | {plan.problem} | | | | |"
            return
        if speed is None:
            yield f"{label} {plan.problem} | | | | |"
            continue
        share = plan.num_slots / max(1, plan.size.num_experts_total)
        shown = f"{share:.0%}" if card else "–"
        kind = "bfloat16" if card else plan.config.kv_cache_dtype
        yield f"{label} {plan.context} | {kind} | {shown} | {_two(speed.decode)} | {_two(speed.prefill)} |"


def fit_of(files: ModelFiles, gib: int, card: str) -> tuple[FitPlan, Speed | None]:
    """The fit on a machine with a shipped profile's card ("": none), and its predicted speed."""
    profile = load_profile(card or "rtx4090-pcie4")
    machine = _machine(gib, profile if card else None)
    plan = plan_fit(EngineConfig(), (), files, machine)
    context = min(_CONTEXT, plan.context)
    if not plan.fits:
        return plan, None
    if card:
        return plan, device_speed(files, profile, [plan.num_slots], context)
    return plan, cpu_speed(files, profile_rates(files, profile), context)


def _machine(gib: int, profile: MachineProfile | None) -> Machine:
    host = int(gib * 2**30 * _FREE_SHARE)
    if profile is None:
        return Machine(host, "none", "no GPU")
    vram = int(profile.figures["vram_gb"].value * 1e9)
    return Machine(host, "cuda", profile.description, (DeviceMemory(vram, vram),))


def _two(value: float) -> str:
    """Two significant digits: the profiles are no more exact."""
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else f"{value:.1f}"
