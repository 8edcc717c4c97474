"""transformers' Trainer on ready micro-batches, with atomic checkpoints, exact held-out losses and progress lines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from twofold.api.errors import TwofoldError
from twofold.api.training_step import TrainingStep
from twofold.training.finetune.batches import IGNORED
from twofold.training.finetune.checkpoints import Checkpoints
from twofold.training.finetune.expert_load import ExpertLoad
from twofold.weights.host_memory import resident_bytes

EVAL_LOSS: Final = "eval_loss"


@dataclass(frozen=True)
class Schedule:
    """Settings of the optimisation."""

    epochs: float = 3.0
    max_steps: int = -1
    """Ends after so many steps; -1: after `epochs`."""
    learning_rate: float = 2e-4
    schedule: str = "cosine"
    """cosine, linear or constant: after warm-up."""
    warmup_share: float = 0.03
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    gradient_accumulation: int = 1
    save_steps: int = 50
    eval_steps: int = 50
    early_stop: int = 0
    """Evaluations without a better held-out loss after which training ends; 0: never."""
    seed: int = 0

    def num_steps(self, num_batches: int) -> int:
        """Optimiser steps of a run."""
        of_epoch = max(1, math.ceil(num_batches / self.gradient_accumulation))
        return self.max_steps if self.max_steps > 0 else math.ceil(self.epochs * of_epoch)

    def arguments(
        self, directory: Path, num_batches: int, device: torch.device
    ) -> transformers.TrainingArguments:
        """The same in transformers' form, for a model on `device`."""
        num_steps = self.num_steps(num_batches)
        names = {"constant": "constant_with_warmup"}
        return transformers.TrainingArguments(
            output_dir=str(directory),
            use_cpu=device.type == "cpu",
            per_device_train_batch_size=1,
            gradient_accumulation_steps=self.gradient_accumulation,
            max_steps=num_steps,
            learning_rate=self.learning_rate,
            lr_scheduler_type=names.get(self.schedule, self.schedule),
            warmup_steps=math.ceil(self.warmup_share * num_steps),
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="steps",
            save_steps=self.save_steps,
            seed=self.seed,
            data_seed=self.seed,
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            dataloader_num_workers=0,
        )


class AdapterTrainer(transformers.Trainer):
    """Trains the factors of a PEFT model. Evaluates at the end of every `eval_steps` and of the run."""

    model: Any

    def __init__(
        self,
        model: Any,
        schedule: Schedule,
        checkpoints: Checkpoints,
        batches: tuple[Sequence[dict[str, Tensor]], Sequence[dict[str, Tensor]]],
        report: Callable[[TrainingStep], None],
    ) -> None:
        """
        Args:
            batches: for training, and held out.
            report: called after each step, and with `eval_loss` again after an evaluation.
        """
        self.checkpoints, self.schedule = checkpoints, schedule
        self.held_out = batches[1]
        self._report, self._meter, self._load = report, _Meter(), ExpertLoad(model)
        self._folder: Path | None = None
        self._last: TrainingStep | None = None
        super().__init__(
            model=model,
            args=schedule.arguments(checkpoints.directory, len(batches[0]), model.device),
            train_dataset=_Batches(batches[0]),
            data_collator=lambda items: items[0],
            callbacks=[_Control(self)],
        )
        self.remove_callback(transformers.PrinterCallback)

    def held_out_loss(self) -> float:
        """Mean loss of the held-out answers' tokens, nats."""
        total = count = 0.0
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            for batch in self.held_out:
                num = int((batch["labels"] != IGNORED).sum())
                total += num * float(self.model(**self._prepare_inputs(batch), use_cache=False).loss)
                count += num
        self.model.train(was_training)
        return total / count

    def measure(self, batch: dict[str, Tensor]) -> float:
        """Seconds of one micro-step of `batch`. Changes nothing: neither parameters nor random numbers."""
        state = torch.random.get_rng_state()
        self.model.train()
        begin = time.perf_counter()
        loss = self.model(**self._prepare_inputs(batch), use_cache=False).loss
        loss.backward()
        loss.item()  # waits for a device
        seconds = time.perf_counter() - begin
        self.model.zero_grad(set_to_none=True)
        self._load.taken()
        torch.random.set_rng_state(state)
        return seconds

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, held-out loss) of the best evaluation; None: there was none."""
        losses = [(each[EVAL_LOSS], each["step"]) for each in self.state.log_history if EVAL_LOSS in each]
        if not losses:
            return None
        loss, step = min(losses)
        return int(step), loss

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        with self._meter.measuring(int(inputs["input_ids"].numel())):
            return super().training_step(model, inputs, num_items_in_batch)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        metrics = {EVAL_LOSS: self.held_out_loss()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._folder or self.args.output_dir)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step

        def write(part: Path) -> None:
            self._folder = part
            try:
                super(AdapterTrainer, self)._save_checkpoint(model, trial)
            finally:
                self._folder = None
            inner = part / self.checkpoints.path(step).name
            for file in inner.iterdir():
                file.rename(part / file.name)
            inner.rmdir()

        best = self.best
        self.checkpoints.write(step, write, best=None if best is None else best[0])

    def report_step(self, logs: dict[str, float]) -> None:
        """Tell the caller about the step that transformers has logged."""
        state = self.state
        entry = next((each for each in reversed(state.log_history) if "loss" in each), None)
        if entry is None:
            return
        if not math.isfinite(entry["loss"]):
            raise TwofoldError(
                f"the loss is {entry['loss']} at step {state.global_step}; lower --learning-rate, and give "
                "another --out"
            )
        if self._last is None or self._last.step != state.global_step:
            num_tokens, seconds, mean_s = self._meter.end_step(state.global_step)
            self._last = TrainingStep(
                step=state.global_step,
                num_steps=state.max_steps,
                at_s=time.time(),
                loss=entry["loss"],
                learning_rate=entry["learning_rate"],
                grad_norm=float(entry.get("grad_norm", math.nan)),
                num_tokens=num_tokens,
                tokens_per_s=num_tokens / seconds,
                remaining_s=mean_s * (state.max_steps - state.global_step),
                memory_bytes=resident_bytes(),
                expert_load=self._load.taken(),
            )
        self._report(replace(self._last, eval_loss=logs.get(EVAL_LOSS)))


class _Batches(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, batches: Sequence[dict[str, Tensor]]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._batches[index]


class _Meter:
    """Time of micro-steps, forward and backward alone."""

    def __init__(self) -> None:
        self._num_tokens, self._seconds, self._begin = 0, 0.0, 0.0
        self._all_seconds = 0.0
        self._first_step: int | None = None

    def measuring(self, num_tokens: int) -> _Meter:
        self._num_tokens += num_tokens
        return self

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._begin

    def end_step(self, step: int) -> tuple[int, float, float]:
        """(tokens and seconds of this step, mean seconds of a step so far); the next step begins."""
        if self._first_step is None:
            self._first_step = step - 1
        found = self._num_tokens, max(self._seconds, 1e-9)
        self._all_seconds += self._seconds
        self._num_tokens, self._seconds = 0, 0.0
        return *found, self._all_seconds / max(1, step - self._first_step)


class _Control(transformers.TrainerCallback):
    """Says when to evaluate, to save, and to stop. Keeps no state: what it reads is in checkpoints."""

    def __init__(self, trainer: AdapterTrainer) -> None:
        self._trainer = trainer

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "train_runtime" not in (logs or {}):
            self._trainer.report_step(logs or {})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        ends = state.global_step >= state.max_steps
        control.should_save |= ends
        if self._trainer.held_out and (ends or state.global_step % self._trainer.schedule.eval_steps == 0):
            control.should_evaluate = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        losses = [each[EVAL_LOSS] for each in state.log_history if EVAL_LOSS in each]
        best = losses.index(min(losses))
        if best == len(losses) - 1:
            control.should_save = True  # the best factors can be taken afterwards
        patience = self._trainer.schedule.early_stop
        if patience and len(losses) - 1 - best >= patience:
            control.should_save = control.should_training_stop = True
