"""A fine-tuning run: checks everything, forecasts, trains or resumes, and writes a PEFT adapter."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from twofold.api.errors import ConfigError, ModelLoadError
from twofold.api.regular_file import read_regular_text
from twofold.api.training_step import TrainingStep
from twofold.api.whole_file import whole_file
from twofold.device.finding import choose_accelerator, device_memories
from twofold.models.model_files import ModelFiles, open_model_files
from twofold.training.base import BaseModel, expert_modules, open_base, shape_alone
from twofold.training.device_lane import DeviceLane, totals_line
from twofold.training.enabling import register_experts
from twofold.training.finetune.answers import AnswerTokens, Example
from twofold.training.finetune.batches import micro_batches, packs_exactly
from twofold.training.finetune.checkpoints import Checkpoints, write_adapter
from twofold.training.finetune.data import TrainingData, read_data
from twofold.training.finetune.forecast import MemoryForecast, forecast_memory
from twofold.training.finetune.targets import GROUPS, find_targets
from twofold.training.finetune.trainer import AdapterTrainer, Schedule
from twofold.training.placing import emulate_device, use_device
from twofold.weights.host_memory import available_memory_bytes

SETTINGS_FILE: Final = "finetune.json"
LOG_FILE: Final = "training_log.json"
_LEAST_TOKENS: Final = 512
"""Default of --batch-tokens for short examples: attention costs the square of a packed row."""
_FREE: Final = ("cpu_threads", "activation_bytes", "num_checkpoints", "accelerator")
"""Settings that a resumed run may have otherwise: they change no figure of the curve but by rounding."""


@dataclass(frozen=True)
class FinetuneConfig:
    """Settings of a run."""

    model: Path
    data: Path
    out: Path
    config: Path | None = None
    """Directory of config.json and tokenizer; None: the model's. A GGUF file needs one."""
    eval_data: Path | None = None
    eval_share: float = 0.05
    """Share of `data` that is held out, without `eval_data`."""
    max_length: int = 0
    """Most tokens of an example; 0: the model's context, at most 2,048."""
    truncate: bool = False
    batch_tokens: int = 0
    """Most tokens of a micro-batch; 0: those of the longest example, at least 512."""
    padding: bool = False
    """Pad examples also where they could be packed."""
    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = GROUPS
    dtype: str = "float32"
    accelerator: str = "none"
    """auto, cuda, none or emulated:PROFILE, as `choose_accelerator`."""
    activation_bytes: int | None = None
    cpu_threads: int = 0
    num_checkpoints: int = 2
    schedule: Schedule = field(default_factory=Schedule)


@dataclass(frozen=True)
class Result:
    """A finished run."""

    loss_before: float | None
    """Held-out loss of the base, nats; None: nothing was held out."""
    loss_after: float | None
    best_step: int


@dataclass(frozen=True)
class Report:
    """Where a run tells what it does."""

    line: Callable[[str], None]
    progress: Callable[[TrainingStep], None]


class FinetuneRun:
    """One run. The constructor reads and checks, and writes nothing."""

    def __init__(self, config: FinetuneConfig, report: Report) -> None:
        """Raises ConfigError and ModelLoadError for settings, data and models that cannot be used."""
        register_experts()
        _be_quiet()
        self.choice, devices = choose_accelerator(config.accelerator)
        self.device = devices[0] if devices else None
        if config.config is None and not config.model.is_dir():
            raise ConfigError(
                f"{config.model}: expected a model directory in Hugging Face layout, or a GGUF file and --config "
                "with the directory of the model's config.json and tokenizer"
            )
        self.report = report
        self.files = open_model_files(config.model)
        self.config = config = _with_lengths(config, self.files)
        self.tokens = AnswerTokens(config.config or config.model, vocab_size=self.files.config.vocab_size)
        self.data = self._read(config.data)
        self.examples, self.held_out = self._split()
        longest = max(map(len, (*self.examples, *self.held_out)))
        self.batch_tokens = config.batch_tokens or max(longest, _LEAST_TOKENS)
        self.meta = _meta_model(config)
        self.targets = find_targets(self.meta, config.targets)
        self.settings = self._settings()
        self.checkpoints = Checkpoints(config.out / "checkpoints", config.num_checkpoints)
        self.is_complete = self._check_out()
        self.memory = self._forecast()

    def train(self) -> Result:
        """Train, or resume at the last checkpoint, and write the adapter.

        Raises TwofoldError, as `CheckpointError`.
        """
        config = self.config
        base = self._open()
        model = self._adapted(base)
        packs = not config.padding and packs_exactly(base.model, self.files.config.vocab_size)
        batches = self._batches(self.examples, packs), self._batches(self.held_out, packs)
        self.report.line(
            f"{len(self.examples):,} examples in {len(batches[0]):,} micro-batches, "
            + (
                "packed, each attends to itself alone"
                if packs
                else "padded: this model's layers cannot be packed"
            )
        )
        trainer = AdapterTrainer(model, config.schedule, self.checkpoints, batches, self.report.progress)
        self._forecast_time(trainer, batches)
        loss_before = self._begin(trainer)
        self.checkpoints.remove_parts()
        steps = self.checkpoints.steps
        if steps:
            self.report.line(f"resuming at step {steps[-1]}")
        last = str(self.checkpoints.path(steps[-1])) if steps else None
        trainer.train(resume_from_checkpoint=last)
        if self.lane is not None:
            virtual = self.choice.clock == "virtual"
            self.report.line(totals_line(self.lane.totals, self.choice.label, is_virtual=virtual))
        best = trainer.best or (self.checkpoints.steps[-1], None)
        _write_json(config.out / LOG_FILE, [_without_time(entry) for entry in trainer.state.log_history])
        write_adapter(config.out, self.checkpoints.path(best[0]))
        return Result(loss_before, best[1], best[0])

    def _read(self, path: Path) -> TrainingData:
        return read_data(path, self.tokens, max_length=self.config.max_length, truncates=self.config.truncate)

    def _split(self) -> tuple[list[Example], list[Example]]:
        """Examples for training, and held out."""
        examples, config = list(self.data.examples), self.config
        if config.eval_data is not None:
            return examples, list(self._read(config.eval_data).examples)
        num = round(config.eval_share * len(examples))
        if num >= len(examples):
            raise ConfigError(
                f"--eval-share {config.eval_share:g} leaves none of {len(examples)} examples to train on"
            )
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(config.schedule.seed))
        chosen = set(order[:num].tolist())
        kept = [example for at, example in enumerate(examples) if at not in chosen]
        return kept, [examples[at] for at in sorted(chosen)]

    def _settings(self) -> dict[str, Any]:
        """What decides the curve, in JSON's types."""
        values = {
            key: value for key, value in asdict(self.config).items() if key not in ("out", "schedule", *_FREE)
        }
        values |= asdict(self.config.schedule)
        values |= {"data_sha256": self.data.sha256, "targets": ",".join(self.config.targets)}
        return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}

    def _check_out(self) -> bool:
        """Whether --out has a finished adapter of this run. ConfigError if it has something else."""
        out, path = self.config.out, self.config.out / SETTINGS_FILE
        if not path.is_file():
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise ConfigError(f"--out {out} exists and holds no run of finetune; name another directory")
            return False
        before: dict[str, Any] = json.loads(read_regular_text(path))["settings"]
        changed = [key for key, value in self.settings.items() if before.get(key) != value]
        if changed:
            key = min(changed, key=lambda name: name == "data_sha256")
            raise ConfigError(
                f"--out {out} holds a run with {_flag(key)} {before.get(key)}, and {self.settings[key]} was given; "
                "give the same to resume it, or another --out"
            )
        return (out / "adapter_config.json").is_file()

    def _forecast(self) -> MemoryForecast:
        row = max(self.batch_tokens, *map(len, (*self.examples, *self.held_out)))
        memory = forecast_memory(
            self.files,
            self.meta,
            self.targets,
            rank=self.config.rank,
            rows=(row, row),
            keeps_bytes=self.config.activation_bytes,
        )
        on_device = None if self.device is None else device_memories([self.device])[0].free_bytes
        memory.check(available_memory_bytes(), on_device)
        return memory

    def _forecast_time(self, trainer: AdapterTrainer, batches: tuple[list[Any], list[Any]]) -> None:
        largest = max(batches[0], key=lambda batch: batch["input_ids"].numel())
        trainer.measure(largest)  # the first one also fills caches
        seconds = trainer.measure(largest) / largest["input_ids"].numel()
        schedule = self.config.schedule
        num_steps = schedule.num_steps(len(batches[0]))
        done = max(self.checkpoints.steps, default=0)
        of_batches = sum(batch["input_ids"].numel() for batch in batches[0]) / len(batches[0])
        trained = (num_steps - done) * schedule.gradient_accumulation * of_batches
        # Forward alone takes about a third.
        evaluated = sum(batch["input_ids"].numel() for batch in batches[1]) / 3
        evaluated *= 1 + (num_steps - done) // schedule.eval_steps
        self.report.line(
            f"forecast: {num_steps - done:,} steps in about {duration((trained + evaluated) * seconds)}, "
            f"{1 / seconds:,.0f} tokens/s, measured"
        )

    def _open(self) -> BaseModel:
        config = self.config
        dtype = getattr(torch, config.dtype)
        base = open_base(
            config.model,
            dtype=dtype,
            torch_device=None if self.device is None else self.device.torch_device,
            cpu_threads=config.cpu_threads,
            config=config.config,
        )
        base.model.config.use_cache = False
        for number, module in enumerate(expert_modules(base.model)):
            module.twofold_layer.keeps = number < self.memory.num_kept_layers  # type: ignore[union-attr]
        self.lane = self._lane(base)
        return base

    def _lane(self, base: BaseModel) -> DeviceLane | None:
        """The device beside the CPU, if there is one."""
        if not self.files.config.moe_layers:
            return None
        if self.device is not None:
            return use_device(base, self.device, rank=self.config.rank)
        if self.choice.profile is not None:
            return emulate_device(base, self.choice.profile, rank=self.config.rank)
        return None

    def _adapted(self, base: BaseModel) -> Any:
        import peft

        transformers.set_seed(self.config.schedule.seed)
        config = self.config
        settings = self.targets.lora_config(
            rank=config.rank, alpha=config.alpha, base=str(config.model.resolve())
        )
        model = peft.get_peft_model(base.model, settings)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return model

    def _batches(self, examples: list[Example], packs: bool) -> list[dict[str, Tensor]]:
        return micro_batches(examples, self.batch_tokens, packs=packs, seed=self.config.schedule.seed)

    def _begin(self, trainer: AdapterTrainer) -> float | None:
        """Held-out loss of the base; on the first start, makes the directory and keeps the settings there."""
        path = self.config.out / SETTINGS_FILE
        if path.is_file():
            loss: float | None = json.loads(read_regular_text(path))["loss_before"]
            return loss
        loss = trainer.held_out_loss() if self.held_out else None
        self.config.out.mkdir(parents=True, exist_ok=True)
        _write_json(path, {"settings": self.settings, "loss_before": loss})
        return loss


def duration(seconds: float) -> str:
    """Like "40 s", "12 min" or "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _with_lengths(config: FinetuneConfig, files: ModelFiles) -> FinetuneConfig:
    from dataclasses import replace

    context = files.config.max_position_embeddings
    length = config.max_length or min(context, 2048)
    if length > context:
        raise ConfigError(f"--max-length {length} is above the model's context of {context}")
    return replace(config, max_length=length)


def _meta_model(config: FinetuneConfig) -> Any:
    """transformers' model without memory. Raises ModelLoadError for one that it does not have."""
    try:
        settings = transformers.AutoConfig.from_pretrained(config.config or config.model)
        return shape_alone(settings, dtype=getattr(torch, config.dtype))
    except (ValueError, KeyError, OSError) as error:
        raise ModelLoadError(
            f"{config.config or config.model}: transformers {transformers.__version__} has no text model for it, so "
            f"it cannot be trained: {error}"
        ) from error


def _be_quiet() -> None:
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # PEFT warns about targets that are parameters, torch about accelerators that this machine lacks.
    warnings.filterwarnings("ignore", module=r"(peft|torch|accelerate|transformers)\b.*")


def _flag(key: str) -> str:
    return "--data with the SHA-256" if key == "data_sha256" else f"--{key.replace('_', '-')}"


def _without_time(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in entry.items() if not key.startswith(("train_", "total_", "eval_runtime"))
    }


def _write_json(path: Path, value: Any) -> None:
    with whole_file(path) as part, part.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
