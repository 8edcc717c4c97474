"""Records expert routing while the engine serves: start, stop and dump at any time.

Mode stat adds no work to a step here: the executor counts. Files are written on the caller's thread, beside the steps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError, RequestError
from twofold.api.placement_config import RECORDER_MODES
from twofold.experts.expert_recordings import ForwardPass, RecordedModel, Recording, write_recording
from twofold.experts.moe import MoeRuntime
from twofold.experts.routing_record import PLACEMENTS

T = TypeVar("T")
SAMPLED: Final = 8
"""Mode stat_approx counts the first of every SAMPLED steps."""
_RESIDENT: Final = 2
_log = logging.getLogger(__name__)


class BetweenSteps(Protocol):
    """Runs work on the engine's thread between two steps; see `LiveControl.between_steps`."""

    def __call__(self, work: Callable[[], T]) -> T: ...


class ExpertRecording:
    """Expert recording of one engine. Only the engine's thread calls `after_step`; other methods may be called from any
    other thread."""

    def __init__(
        self, config: EngineConfig, model: RecordedModel, moe: MoeRuntime, between_steps: BetweenSteps
    ) -> None:
        self._config, self._model, self._moe = config, model, moe
        self._between_steps = between_steps
        self._dumping = threading.Lock()
        self._recording: Recording | None = None
        self._since_dump: Recording | None = None
        self._running = False
        self._keeps_passes = False
        if config.record_gpu_expert_distribution:
            self._start(config.expert_distribution_recorder_mode)

    # ---- callers' threads -------------------------------------------------------------------------------------------

    def start(self, mode: str | None = None) -> dict[str, Any]:
        """Start a new recording at the next step; data not dumped is discarded. Returns as `status`, plus the number of
        discarded passes under "discarded_passes".

        Raises:
            RequestError: unknown mode.
        """
        mode = mode or self._config.expert_distribution_recorder_mode
        if mode not in RECORDER_MODES:
            raise RequestError(
                f"mode is {mode[:200]!r}; expected one of {', '.join(RECORDER_MODES)}", param="mode"
            )
        return self._between_steps(lambda: self._start(mode))

    def stop(self) -> dict[str, Any]:
        """Stop recording; recorded data stays until it is dumped. Returns as `status`. Safe to call twice."""
        return self._between_steps(self._stop)

    def status(self) -> dict[str, Any]:
        """Whether a recording is running, and its `Recording.summary`."""
        return self._between_steps(self._status)

    def dump(self) -> dict[str, Any]:
        """Write what was recorded since the start or the last dump, then continue from zero. Returns the summary, with
        file names under "files".

        Raises:
            RequestError: there is nothing to write.
            ConfigError: writing failed; the data is kept.
        """
        return self._dump(self._between_steps)

    def _dump(self, between_steps: BetweenSteps) -> dict[str, Any]:
        with self._dumping:
            recording, resident = between_steps(self._take)
            directory = Path(self._config.expert_distribution_recorder_dir).expanduser()
            try:
                files = write_recording(directory, recording, self._model, resident)
            except BaseException:
                between_steps(lambda: self._restore(recording))
                raise
        if recording.num_dropped:
            _log.warning(
                "the recording dropped its %d oldest passes and wrote %d; its sums cover all passes",
                recording.num_dropped,
                len(recording.passes),
            )
        _log.info("routed experts recorded to %s", files[0])
        return recording.summary() | {"files": [str(path.absolute()) for path in files]}

    def close(self) -> None:
        """Dump a recording started by --record-gpu-expert-distribution, if it has not been dumped.

        The engine's thread has ended and other callers are refused, so this runs on the caller's thread.
        """
        if not self._config.record_gpu_expert_distribution:
            return
        try:
            self._dump(lambda work: work())
        except RequestError:
            pass  # no step was recorded, or all are in a dump
        except ConfigError as error:
            _log.error("the recording of routed experts is lost: %s", error)

    # ---- the engine's thread ----------------------------------------------------------------------------------------

    def after_step(self, number: int) -> None:
        """Record step `number`, which has finished."""
        if not self._keeps_passes:
            return
        recording, record = self._recording, self._moe.routing
        assert recording is not None
        counts, num_passes, num_tokens = record.take()
        if num_passes == 0:  # the pass was lost
            return
        recording.add(counts, num_passes, num_tokens)
        rows = record.take_step() if recording.mode == "per_token" else None
        recording.keep(ForwardPass(number, counts.astype(np.int32), rows or {}))

    def _start(self, mode: str) -> dict[str, Any]:
        discarded = self._updated_recording()
        self._recording = self._new_recording(mode)
        self._moe.routing.start(tokens=mode == "per_token", every=SAMPLED if mode == "stat_approx" else 1)
        self._running, self._keeps_passes = True, mode in ("per_pass", "per_token")
        lost = 0 if discarded is None else discarded.num_passes
        return self._status() | {"discarded_passes": lost}

    def _new_recording(self, mode: str) -> Recording:
        shape = (len(self._model.moe_layers), self._model.num_experts)
        counts = np.zeros((len(PLACEMENTS), *shape), np.int64)
        return Recording(mode, counts, self._config.expert_distribution_recorder_buffer_size)

    def _stop(self) -> dict[str, Any]:
        if self._running:
            self._updated_recording()
            self._moe.routing.stop()
            self._running = self._keeps_passes = False
        return self._status()

    def _status(self) -> dict[str, Any]:
        recording = self._updated_recording()
        return {"recording": self._running} | ({} if recording is None else recording.summary())

    def _updated_recording(self) -> Recording | None:
        """The recording with everything counted so far."""
        if self._recording is not None and self._running:
            self._recording.add(*self._moe.routing.take())
        return self._recording

    def _take(self) -> tuple[Recording, Any]:
        recording = self._updated_recording()
        if recording is None:
            raise RequestError("nothing was recorded: start a recording first, then let requests run")
        if recording.num_passes == 0:
            raise RequestError(
                "nothing was recorded since the start or the last dump; let requests run"
                + ("" if self._running else ", after starting a recording")
            )
        self._recording = self._since_dump = self._new_recording(recording.mode)
        resident = None
        if self._config.record_gpu_expert_distribution:
            placed = self._moe.executor.placement()
            resident = np.zeros(recording.routed.shape, bool) if placed is None else placed[0] == _RESIDENT
        return recording, resident

    def _restore(self, recording: Recording) -> None:
        if self._recording is not None and self._recording is self._since_dump:
            self._recording.put_before(recording)
