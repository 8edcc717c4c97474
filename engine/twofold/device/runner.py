"""Runs scheduled steps of a model whose dense part is on a device, and samples the next tokens. See `Runner`.

A step runs in one of three ways. A decode step is a *table step*: the device places its layers itself while this thread
serves the misses, as one captured graph, or launched kernel by kernel from a worker where it could not be captured.
Every other step is *placed by the host*: each layer's routing is copied to the host, its experts are assigned, and the
assignment is copied back; with several devices that is every step. If a table step is lost (one side waited longer than
the watchdog's limit), it is repeated as placed by the host, and so is every later step. The request continues; the
reason is logged once. If that fails too, `loss` decides whether the device is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Final

import torch
from torch import Tensor

from twofold.api.errors import CapacityError, DeviceLostError, KernelError
from twofold.blocks import ops
from twofold.blocks.device_step import DeviceBatch
from twofold.device.adapters.loaded import DeviceAdapters, rows_on_cpu, step_with
from twofold.device.backend import ServedStep
from twofold.device.checks.loss import finite_rows, finite_tokens, raise_if_lost
from twofold.device.decode_inputs import DecodeRow
from twofold.device.device import Device
from twofold.device.graphs import BATCH_SIZES, DecodeGraphs
from twofold.device.model import DeviceModel
from twofold.device.placed_layers import PlacedLayers
from twofold.device.queue import Outputs, joined
from twofold.device.sampler import DeviceSampler
from twofold.device.state_memory import DeviceStateMemory
from twofold.device.step_rows import decode_rows, flattened
from twofold.device.table_layers import TableLayers
from twofold.experts.moe import MoeRuntime
from twofold.experts.pins import cpu_layers
from twofold.experts.placement import Mask
from twofold.step.batch import adapters_of, pictures_of, verified_rows
from twofold.step.runner import pool_prompts, report_prompts
from twofold.step.sampler import Sampler, pick_undecided
from twofold.step.sequences import Schedule, ScheduledSequence

_log = logging.getLogger(__name__)
_STEPS_PER_SPLIT: Final = 256
"""Table steps between two updates of the cost model's split of misses."""
_SEVERAL: Final = "several devices share the experts"
"""Why there are no table steps where there are several devices."""
_REST_S: Final = 30.0
"""Time a device may take to finish an aborted step, beyond the watchdog's limit."""


class LostStepError(KernelError):
    """A table step did not finish. Its requests are unaffected."""


class DeviceRunner:
    """A model, its KV cache and its expert runtime on a device. See `Runner` and `Verifier`."""

    def __init__(
        self,
        model: DeviceModel,
        moe: MoeRuntime,
        devices: Seq[Device],
        *,
        num_pages: int,
        page_size: int,
        max_context: int,
        num_records: int = 0,
        num_snapshots: int = 0,
        num_draft_records: int = 0,
        handshake: str = "",
        watchdog_s: float = 5.0,
        graphs: bool = True,
        look_ahead: bool = False,
        homes: Seq[int] = (),
        adapters: DeviceAdapters | None = None,
    ) -> None:
        """Allocate keys, values and records, and the buffers of table steps.

        Args:
            moe: expert runtime whose accelerator is on `devices`; the model's dense weights are on the first one.
            max_context: longest request, in tokens.
            num_records: records of sequences, where layers keep records; the snapshots' numbers follow, then those of
                `num_draft_records` for the state after each draft of a step.
            handshake: how a step waits for the CPU, see `TableLayers`; "": the fastest by a probe.
            watchdog_s: limit for the device's wait for the CPU's experts, and the CPU's wait for the device's posts.
            graphs: False: launch table steps kernel by kernel, for comparison.
            look_ahead: table steps also post the next layer's router scores, for expert prefetch.
            homes: the device of each layer with experts, as in `PlacedLayers`. adapters: None: no row uses one.

        Raises:
            ConfigError: the device has no kernels for the experts' formats.
            KernelError, MemoryError: the device failed, or lacks memory.
        """
        self.moe = moe
        self.pool: ops.ThreadPool = moe.pool
        self.vocab_size: int = model.config.vocab_size
        self.sampling_s = self.batch_s = 0.0
        self.num_table_steps = self._num_failed_in_a_row = 0
        self.why_placed: str | None = _SEVERAL if len(devices) > 1 else None
        """Why steps are no longer table steps; None while they are."""
        self._model, self._page_size, self._watchdog_s = model, page_size, watchdog_s
        self._num_pages, self._max_context, self._handshake = num_pages, max_context, handshake
        self._num_records = num_records + num_draft_records
        self._looks_ahead, self._homes, self._adapters = look_ahead, homes, adapters
        self._state = model.state(num_pages, page_size, self._num_records)
        self._logits = torch.empty(0)
        """Logits of the last step's sampled rows, those of drafts included."""
        self._picked: list[int] = []
        """Their tokens as the device picked them, with the random numbers that they get if all drafts are accepted."""
        self._devices, self._device, self._has_several = devices, devices[0], len(devices) > 1
        self._sampler = DeviceSampler(BATCH_SIZES[-1], self._device)
        self._queue = joined([device.queue(lambda: self._layers.mailbox.abort()) for device in devices])
        self.memory = DeviceStateMemory(
            model.blocks_with_state(self._state), self._queue, num_records, num_snapshots
        )
        with self._device.active():
            self._make_steps(None if graphs else "graphs are switched off")

    def _make_steps(self, fall_back_reason: str | None) -> None:
        """Create the objects that depend on the accelerator's slots."""
        moe, device = self.moe, self._device
        if moe.accelerator is None:
            raise ValueError("experts without an accelerator were given; those of a device were expected")
        self._placed = PlacedLayers(
            self._devices,
            moe.accelerator,
            moe.executor,
            moe.shape,
            moe.plan.cache_prior,
            homes=self._homes,
            adapters=self._adapters is not None,
        )
        if self._has_several:
            return
        self._layers = TableLayers(
            device,
            moe.accelerator,
            moe.store,
            moe.shape,
            max_tokens=BATCH_SIZES[-1],
            handshake=self._handshake,
            watchdog_s=self._watchdog_s,
            look_ahead=self._looks_ahead,
            cpu_layers=cpu_layers(moe.plan.devices),
            defers=moe.plan.num_deferred > 0,
            cache_prior=moe.plan.cache_prior,
            adapters=self._adapters is not None,
        )
        self._table = device.native.table_step(self._layers.mailbox, moe.executor, moe.accelerator, moe.pool)
        self._graphs = DecodeGraphs(
            step=self._table_forward,
            queue=self._queue,
            device=device,
            page_size=self._page_size,
            max_pages=-(-self._max_context // self._page_size),
            rehearsal=self._layers.rehearsal,
            keeps_records=self._num_records > 0,
            input_width=0 if self._model.inputs is None else self._model.inputs.width,
            fall_back_reason=fall_back_reason,
        )
        if self._adapters is not None:
            self._adapters.on_change = self._graphs.forget_adapted

    @property
    def why_eager(self) -> str | None:
        """Why table steps are launched kernel by kernel; None where they are graphs, or where there are none."""
        return None if self._has_several else self._graphs.fall_back_reason

    # ---- changing the memory split -----------------------------------------------------------------------------------

    def resize_pages(self, num_pages: int, places: Mapping[int, int], *, keep_records: bool = True) -> None:
        """See `Runner.resize_pages`. Kept pages are in host memory meanwhile: the device cannot hold both copies."""
        self._queue.wait()
        copies = self.memory.copy_to_host(list(places), records=keep_records)
        try:
            self._move_pages(num_pages, copies, list(places.values()))
        except torch.OutOfMemoryError as error:
            self._move_pages(self._num_pages, copies, list(places))
            raise CapacityError(
                f"the device has less room than it said ({str(error).splitlines()[0]}); nothing has changed: ask for "
                "fewer tokens"
            ) from error
        self._num_pages = num_pages

    def _move_pages(
        self, num_pages: int, copies: tuple[list[Tensor], list[Tensor]], places: Seq[int]
    ) -> None:
        if not self._has_several:
            self._graphs.forget()
        self.memory.release()
        self._state = []
        torch.cuda.empty_cache()  # slots are not allocated by torch
        self._state = self._model.state(num_pages, self._page_size, self._num_records)
        self.memory.hold(self._model.blocks_with_state(self._state))
        self.memory.copy_from_host(copies, places)
        self._queue.wait()

    def release_slots(self) -> None:
        self._queue.wait()
        self._why_eager = self.why_eager
        del self._placed
        if not self._has_several:
            del self._graphs, self._table, self._layers
        self.moe.release()
        torch.cuda.empty_cache()

    def allocate_slots(self, num_slots: int, num_staging: int) -> None:
        self.moe.allocate(num_slots, num_staging)
        with self._device.active():
            self._make_steps(self._why_eager)

    def place_experts(self, mask: Mask) -> int:
        self._queue.wait()  # kernels in the queue may read any slot
        return self.moe.place_experts(mask)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def forward(self, step: int, schedule: Schedule, samplers: Seq[Sampler]) -> list[int]:
        """See `Runner.forward`. CapacityError where the device ran out of memory: the next step may have enough.
        DeviceLostError where the next step would fail, too."""
        try:
            tokens = self._forward(step, schedule.items, samplers)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"the device ran out of memory in a step of {sum(item.num_tokens for item in schedule.items)} tokens "
                f"({str(error).splitlines()[0]}); lower --max-num-batched-tokens, --max-num-seqs or "
                "--gpu-memory-utilization"
            ) from error
        except (CapacityError, DeviceLostError):
            raise
        except (KernelError, RuntimeError) as error:
            self._num_failed_in_a_row += 1
            raise_if_lost(self._devices, error, self._num_failed_in_a_row)
            raise
        self._num_failed_in_a_row = 0
        return tokens

    def _forward(self, step: int, scheduled: Seq[ScheduledSequence], samplers: Seq[Sampler]) -> list[int]:
        if self._is_table_step(scheduled):
            try:
                return self._table_step(step, scheduled, samplers)
            except LostStepError as lost:
                self.why_placed = str(lost)
                _log.warning("decode steps are placed by the host from now on: %s", lost)
        return self._placed_step(step, scheduled, samplers)

    def _is_table_step(self, scheduled: Seq[ScheduledSequence]) -> bool:
        return (
            self.why_placed is None
            and sum(item.num_tokens for item in scheduled) <= BATCH_SIZES[-1]
            and all(item.num_tokens == 1 + len(item.drafts) and item.samples for item in scheduled)
        )

    # ---- table steps -------------------------------------------------------------------------------------------------

    def _table_forward(self, batch: DeviceBatch) -> Outputs:
        adapted = step_with(self._adapters, batch.adapters)
        experts = [] if adapted is None else adapted.experts
        self._layers.begin_step(experts[0] if experts else None)
        hidden = self._model.forward(batch, self._state, self._layers, adapted)
        logits = self._model.logits(hidden, adapted)
        return self._sampler.pick(logits), logits

    def _table_step(self, step: int, scheduled: Seq[ScheduledSequence], samplers: Seq[Sampler]) -> list[int]:
        inputs = None if self._model.inputs is None else self._model.inputs.read(scheduled)
        rows = decode_rows(scheduled, self.memory.record_index, inputs)
        self._prepare(rows)
        try:
            with rows_on_cpu(self._adapters, [row.adapter for row in rows]):
                tokens, logits = self._run_table_step(step, rows, scheduled, samplers)
        except LostStepError as lost:
            failure = self._give_up()
            raise LostStepError(f"launching a step failed ({failure})" if failure else str(lost)) from None
        except BaseException:
            self._give_up()
            raise
        self.num_table_steps += 1
        self._picked, self._logits = finite_tokens(tokens), logits
        return self.pick_verified([at for at, row in enumerate(rows) if not row.chain], samplers)

    def _run_table_step(
        self, step: int, rows: list[DecodeRow], scheduled: Seq[ScheduledSequence], samplers: Seq[Sampler]
    ) -> tuple[list[int], Tensor]:
        """(sampled tokens, logits). Raises LostStepError, and any error of the CPU's part."""
        numbers = [item.sequence.number for item in scheduled for _ in range(item.num_tokens)]
        positions = [row.position for row in rows]
        generated = _generated(scheduled) if self.moe.plan.changes_outputs else []
        try:
            self._table.begin(
                step, numbers, positions, self._queue.stream, generated, verified_rows(scheduled)
            )
        except KernelError as error:
            raise LostStepError(f"beginning a step failed ({error})") from error
        with self._queue.active():
            self._sampler.fill(
                [
                    sampler.draw(num_later)
                    for item, sampler in zip(scheduled, samplers, strict=True)
                    for num_later in range(item.num_tokens)
                ]
            )
            self._fill_cache_prior(self._layers, generated)
        picked, logits = self._graphs.start(rows)
        served = self._table.serve(self._layers.next_number(), self._watchdog_s)
        _check(served)
        try:
            self._queue.join()
        except Exception as error:  # any launch error loses the step; the next way is tried
            raise LostStepError(f"launching a step failed ({error})") from error
        self._table.end(self._queue.stream)
        self._queue.wait()
        tokens: list[int] = picked.tolist()
        _check(self._table.confirm())
        return tokens, logits

    def _prepare(self, rows: list[DecodeRow]) -> None:
        """Prepare a step of such rows and synchronise its number on both sides. Raises LostStepError."""
        if self.num_table_steps % _STEPS_PER_SPLIT == 0:
            with self._queue.active():
                self._layers.refresh_split()
        if self._graphs.is_prepared(rows):
            return
        try:
            self._graphs.prepare(rows)
            self._queue.wait()
        except (RuntimeError, KernelError) as error:
            raise LostStepError(f"preparing a step of {len(rows)} failed ({error})") from error
        finally:
            self._layers.resynchronise()

    def _give_up(self) -> str:
        """Abort the running step on both sides so that another can start. Returns the error of a launch."""
        self._layers.mailbox.abort()
        failure = self._queue.wait_idle(_REST_S + self._watchdog_s)
        self._table.give_up(self._queue.stream)
        self._layers.resynchronise()
        return failure

    # ---- steps placed by the host ------------------------------------------------------------------------------------

    def _placed_step(self, step: int, scheduled: Seq[ScheduledSequence], samplers: Seq[Sampler]) -> list[int]:
        requests: list[int] = []
        positions: list[int] = []
        for item in scheduled:
            begin = item.sequence.num_computed
            requests += [item.sequence.number] * item.num_tokens
            positions += range(begin, begin + item.num_tokens)
        generated = _generated(scheduled) if self.moe.plan.changes_outputs else []
        inputs = None if self._model.inputs is None else self._model.inputs.read(scheduled, ahead=True)
        with self._queue.active(), rows_on_cpu(self._adapters, adapters_of(scheduled)):
            self.moe.begin_step(
                step, requests, positions, generated, verified_rows(scheduled), pictures_of(scheduled)
            )
            batch, sampled_rows, first_rows = flattened(
                scheduled,
                self._page_size,
                self._model.device,
                self.memory.record_index,
                inputs=inputs,
            )
            adapted = step_with(self._adapters, batch.adapters)
            self._placed.begin_step(() if adapted is None else adapted.experts)
            self._fill_cache_prior(self._placed, generated)
            hidden = self._model.forward(batch, self._state, self._placed, adapted)

            def logits_of(rows: list[int]) -> Tensor:
                return self._model.logits(hidden[rows], None if adapted is None else adapted.of(rows))

            pool_prompts(
                scheduled,
                lambda rows: finite_rows(self._model.final_states(hidden[rows])),
                lambda rows: finite_rows(logits_of(rows)),
            )
            report_prompts(self.pool, scheduled, lambda rows: finite_rows(logits_of(rows)))
            self._logits = logits_of(sampled_rows) if samplers else hidden[:0]
            counts = [1 + len(item.drafts) for item in scheduled if item.samples]
            self._picked = self._pick(samplers, counts)
            self._queue.wait()
            self._placed.end_step()
        self.moe.executor.end_step()
        return self.pick_verified(first_rows, samplers)

    def pick_verified(self, rows: Seq[int], samplers: Seq[Sampler]) -> list[int]:
        """See `Verifier.pick_verified`. The device has picked where it can; the host picks the others now."""
        began = time.perf_counter()
        tokens = [self._picked[row] for row in rows]
        with self._queue.active():
            picked = pick_undecided(
                self.pool,
                samplers,
                tokens,
                lambda undecided: self._logits[[rows[at] for at in undecided]].cpu().numpy(),
            )
        self.sampling_s += time.perf_counter() - began
        return picked

    def _fill_cache_prior(self, layers: TableLayers | PlacedLayers, generated: Seq[bool]) -> None:
        placement = self.moe.executor.placement() if self.moe.plan.cache_prior > 0 else None
        if placement is not None:
            layers.fill_cache_prior(placement[0], generated)

    def _pick(self, samplers: Seq[Sampler], num_rows: Seq[int]) -> list[int]:
        """Tokens of the newest logits, `num_rows` per sampler."""
        if not samplers:
            return []
        draws = [
            each.draw(num_later)
            for each, count in zip(samplers, num_rows, strict=True)
            for num_later in range(count)
        ]
        is_usual = len(draws) <= BATCH_SIZES[-1]
        sampler = self._sampler if is_usual else DeviceSampler(len(draws), self._device)
        sampler.fill(draws)
        return finite_tokens(sampler.pick(self._logits).tolist())


def _check(served: ServedStep) -> None:
    if not served["done"]:
        raise LostStepError(served["text"])


def _generated(scheduled: Seq[ScheduledSequence]) -> list[bool]:
    """Per token of the step: whether it is a decode token, not a prompt token."""
    return [
        item.sequence.num_computed + n >= item.sequence.num_prompt_tokens
        for item in scheduled
        for n in range(item.num_tokens)
    ]
