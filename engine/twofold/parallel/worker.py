"""A rank other than 0: loads its share of the weights and answers rank 0's jobs until it gets the job to stop."""

from __future__ import annotations

import logging

from twofold import _core
from twofold.api.config import EngineConfig
from twofold.blocks import ops
from twofold.experts.packing import pack_experts
from twofold.experts.spread import RankShare
from twofold.models import ModelFiles
from twofold.parallel.joining import Meeting
from twofold.parallel.link import F32, I32, STOP, RankLink
from twofold.step.expert_loading import expert_spread, moe_shape
from twofold.step.model import LoadedModel

_log = logging.getLogger(__name__)


class Worker:
    """The share of one rank, loaded."""

    def __init__(self, config: EngineConfig, files: ModelFiles, share: RankShare) -> None:
        """Load it. Raises ConfigError, ModelLoadError as loading a whole model does."""
        self._pool = pool = ops.ThreadPool(config.cpu_threads, config.numa)
        files = files.from_panels(share)
        LoadedModel(files, pool)  # asks the share for every matrix
        store: _core.ExpertStore | None = None
        if (spread := expert_spread(config, files)) is not None:
            store = pack_experts(moe_shape(files), files.expert_layers(reads_ahead=False), pool, None, spread)
        self.num_bytes = share.num_bytes + (0 if store is None else store.bytes)
        self._native = _core.RankWorker(pool, share.matrices, store)

    def run(self, link: RankLink) -> None:
        """Answer jobs. Raises KernelError if rank 0 is lost, ValueError for a damaged job."""
        self._pool.bind_caller()
        while True:
            job, rows = link.next_job()
            if job[0] == STOP:
                return
            link.answer(self.answer(job, rows))

    def answer(self, job: I32, rows: F32) -> F32:
        """The answer to one job. Raises ValueError for a damaged one."""
        return self._native.run(job, rows)


def run_worker(
    config: EngineConfig, files: ModelFiles, *, share: RankShare, meeting: Meeting, link: RankLink
) -> None:
    """Load, wait for the other ranks and serve rank 0. Raises as `Worker`, and KernelError if a rank is lost."""
    with meeting.loading():
        worker = Worker(config, files, share)
    meeting.wait_until_loaded(link, worker.num_bytes)
    _log.info("rank %d of %d holds %.1f MB of weights", link.rank, link.size, worker.num_bytes / 1e6)
    worker.run(link)
