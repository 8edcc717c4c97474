"""A process's life as a rank, from its settings to its end."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError, KernelError
from twofold.api.parallel_config import ParallelConfig
from twofold.experts.spread import RankShare
from twofold.models import ModelFiles, open_model_files
from twofold.parallel.groups import close_default_group
from twofold.parallel.identity import identity_of
from twofold.parallel.joining import Meeting
from twofold.parallel.link import RankLink
from twofold.parallel.local_ranks import LocalRanks
from twofold.parallel.place import bind_to_cores, find_place
from twofold.parallel.worker import run_worker


class Leader:
    """Rank 0, which loads and serves the model while the other ranks load their shares."""

    def __init__(self, share: RankShare, link: RankLink, meeting: Meeting, local: LocalRanks) -> None:
        self.share = share
        self.link = link
        self.meeting = meeting
        self._local = local
        self._num_bytes: list[int] = []

    def start(self, num_bytes: int, on_lost: Callable[[str], None]) -> None:
        """Wait until all ranks have loaded; watch them from now on.

        Args:
            num_bytes: bytes of this rank's.
            on_lost: called once, on a thread, with how a rank was lost.

        Raises:
            ModelLoadError: another rank cannot load its share. KernelError: another rank was lost.
        """
        self._num_bytes = self.meeting.wait_until_loaded(self.link, num_bytes)
        is_reported = threading.Lock()

        def report(reason: str) -> None:
            if is_reported.acquire(blocking=False):
                self.link.lost = self.link.lost or reason
                on_lost(self.link.lost)

        self.link.start_pings(report)
        self._local.watch(report)

    def described(self) -> str:
        """The ranks and their weights, for the greeting."""
        shares = (
            f"{name}: {num_bytes / 1e6:.1f} MB"
            for name, num_bytes in zip(self.link.names, self._num_bytes, strict=True)
        )
        return f"  {'ranks':<12} {self.link.size}, with weights of {'; '.join(shares)}"


def run_rank(
    config: EngineConfig, parallel: ParallelConfig, arguments: Sequence[str], lead: Callable[[Leader], int]
) -> int:
    """Join the ranks; `lead` runs on rank 0, and the other ranks work for it until it ends. Returns the exit code.

    Args:
        arguments: those of `twofold`, for the other ranks of this machine.

    Raises:
        ConfigError: a setting does not work with ranks, or the ranks cannot meet.
        ModelLoadError: a share cannot be loaded. KernelError: a rank was lost.
    """
    config = rank_config(config)
    place = find_place(parallel)
    files = open_model_files(Path(config.model), config.speculation.mtp_use)
    files = files.caching_rows(config.row_cache_bytes)
    check_rank_files(files)
    meeting = Meeting(place, parallel.distributed_timeout_s, parallel.distributed_backend)
    with _local_ranks(arguments, parallel, meeting) as local:
        bind_to_cores(place)
        meeting.ending_of = local.ending_of
        link = meeting.join(identity_of(config, parallel, files))
        link.ending_of = local.ending_after_loss
        share = RankShare(link.ranks, parallel)
        if place.rank > 0:
            run_worker(config, files, share=share, meeting=meeting, link=link)
            close_default_group()
            return 0
        try:
            code = lead(Leader(share, link, meeting, local))
        finally:
            link.close()
        if link.lost:
            raise KernelError(link.lost)
        close_default_group()
        return code


@contextlib.contextmanager
def _local_ranks(
    arguments: Sequence[str], parallel: ParallelConfig, meeting: Meeting
) -> Iterator[LocalRanks]:
    """The other ranks of this machine, unless torchrun starts them."""
    place = meeting.place
    if "RANK" in os.environ:
        place = place.alone()
    local = LocalRanks(arguments, place, meeting.port)
    try:
        yield local
    except BaseException:
        local.terminate()
        raise
    local.close()


def rank_config(config: EngineConfig) -> EngineConfig:
    """The configuration of a rank, which computes on CPUs. Raises ConfigError for settings that do not work there."""
    for flag, is_given, remedy in (
        (f"--accelerator {config.accelerator}", config.accelerator not in ("auto", "none"), "give none"),
        (f"--devices {config.devices}", config.devices is not None, "leave it out"),
        ("--optimize-config", config.optimize_config is not None, "leave it out"),
        ("--packed-cache", config.packed_cache is not None, "leave it out"),
    ):
        if is_given:
            raise ConfigError(
                f"{flag} was given with --tensor-parallel-size above 1, whose ranks compute on CPUs from the model's "
                f"own files; {remedy}"
            )
    return replace(config, accelerator="none")


def check_rank_files(files: ModelFiles) -> None:
    """ConfigError for a packed model."""
    if files.mapped is not None:
        raise ConfigError(
            f"{files.mapped.path} is a packed model, and --tensor-parallel-size is above 1: ranks pack their shares of "
            "the model that it was packed from; give that one"
        )
