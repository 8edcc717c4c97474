"""Loads everything an engine owns from a configuration: model, experts, KV cache, tokenizer and run record.

Chooses the accelerator and builds for it. `device.loading` builds the runner where dense weights are on a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twofold import __version__, _core
from twofold.adapters.reading import reserved_bytes
from twofold.api.config import EngineConfig
from twofold.api.errors import KernelError, ModelLoadError
from twofold.api.pooling import ModelPooling, parse_pooler_config
from twofold.api.types import RunInfo
from twofold.blocks import ops
from twofold.device.finding import (
    choose_accelerator,
    cuda_indices,
    keep_for_ever,
    may_leave_devices,
    without_devices,
)
from twofold.engine.host_plan import host_planner
from twofold.engine.kv_cache import PagePool
from twofold.engine.module_rules import ModuleRules, apply_rules
from twofold.engine.prefix.loading import make_pool
from twofold.engine.prefix.store import PrefixStore
from twofold.engine.residency import Residency
from twofold.experts.accelerator import AcceleratorChoice, num_slots
from twofold.experts.device_split import device_split
from twofold.experts.expert_recordings import RecordedModel
from twofold.experts.machine_facts import machine_json
from twofold.experts.moe import MoeRuntime
from twofold.experts.pins import check_pins
from twofold.experts.placement import check_placement
from twofold.experts.policies import check_policy
from twofold.experts.spread import RankShare
from twofold.experts.warm_start import open_cache_state
from twofold.models import ModelFiles, ProgressFn, open_model_files, picture_encoder
from twofold.models.bundled import bundled_model_path
from twofold.models.config import ModelConfig, has_bidirectional_pictures
from twofold.models.pooling import read_pooling
from twofold.models.sizing import trace_sizes
from twofold.step.adapters import AdaptedModel, ModelAdapters
from twofold.step.capacity import plan_capacity
from twofold.step.drafters.drafter import ModelDrafter
from twofold.step.drafters.mtp import MtpDrafter
from twofold.step.drafters.opening import NO_DRAFT_MEMORY, OpenedDrafter, open_drafter_model
from twofold.step.expert_loading import load_experts, slot_plan
from twofold.step.model import LoadedModel
from twofold.step.runner import LoadedRunner, ModelRunner
from twofold.text.tokenizer import Tokenizer
from twofold.vision.service import PictureSource
from twofold.vision.source import picture_source
from twofold.weights.gguf_source import GgufSource
from twofold.weights.mapped_files import MappedFiles
from twofold.weights.panel_file import check_if_changed

if TYPE_CHECKING:
    from twofold.device.device import Device

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineParts:
    """Result of `load_parts`."""

    tokenizer: Tokenizer
    info: RunInfo
    kv_pages: PagePool
    loaded: LoadedRunner
    """The runner, and the planner of its possible sizes."""
    cache_state: Path | None
    residency: Residency | None
    """Set for memory-mapped weights."""
    recorded: RecordedModel
    """Model description for recordings of routed experts."""
    drafter: ModelDrafter | None
    """Drafter that computes with a model, if one is configured."""
    pooling: ModelPooling
    """How the model pools hidden states."""
    bidirectional_pictures: bool
    """Whether tokens of a picture attend to one another."""
    weights: MappedFiles
    """Files that steps read weights from."""
    pictures: PictureSource | None = None
    """The model's picture encoder; None: it reads text only."""
    adapters: AdaptedModel | None = None
    """Where adapters go; None: the runner computes none."""
    reload_on_cpu: Callable[[str], EngineParts] | None = None
    """Loads the model without its devices, for the given reason, with the packed experts. None: there are no devices,
    or they were asked for."""


def load_parts(
    config: EngineConfig,
    progress: ProgressFn | None = None,
    prefix_store: PrefixStore | None = None,
    share: RankShare | None = None,
) -> EngineParts:
    """Load the model of `config`. prefix_store: as in `make_pool`. share: rank 0's share of the weights, if other ranks
    hold the rest.

    Devices that fail the self-check, or while the model is loaded, are left to the CPU, unless the user asked for them.

    Raises:
        ConfigError: a setting cannot be met, or the devices that were asked for failed.
        ModelLoadError: the model cannot be used; the message names the file and the remedy.
        CapacityError, KernelError: the device is out of memory, or failed.
    """
    check_policy(config)
    check_placement(config)
    choice, devices = choose_accelerator(config.accelerator, cuda_indices(config))
    path = Path(config.model) if config.model else bundled_model_path()
    # Cheap checks come before gigabytes are read.
    files = open_model_files(path, config.speculation.mtp_use).caching_rows(config.row_cache_bytes)
    pooling = read_pooling(path, files, parse_pooler_config(config.pooler_config))
    if files.mapped is not None:
        check_if_changed(files.mapped.path, files.mapped.contents)
        files.mapped.mapping.accept()  # the check may set the file's time
    if files.config.context_limit_reason:
        _log.warning("%s: %s", path, files.config.context_limit_reason)
    pool = ops.ThreadPool(config.cpu_threads, config.numa)
    opened = _Opened(config, path, files, pooling, pool, progress, prefix_store, share)
    if not devices:
        return opened.load(choice)
    try:
        if problem := _self_check(config, choice, devices, files, pool):
            return opened.load(without_devices(config, problem))
        parts = opened.load(choice, devices)
    except KernelError as error:
        if not may_leave_devices(config):
            raise
        keep_for_ever(error)  # and what was loaded
        problem = f"{choice.label} failed while the model was loaded ({error})"
        return opened.load(without_devices(config, problem))

    def reload_on_cpu(reason: str) -> EngineParts:
        return opened.load(AcceleratorChoice("none", reason), store=parts.loaded.runner.moe.store)

    return dataclasses.replace(parts, reload_on_cpu=reload_on_cpu if may_leave_devices(config) else None)


def _self_check(
    config: EngineConfig,
    choice: AcceleratorChoice,
    devices: Sequence[Device],
    files: ModelFiles,
    pool: ops.ThreadPool,
) -> str:
    """Why the devices may not be used; "" if they passed, or if no check was asked for."""
    if not config.gpu_self_check:
        return ""
    # Imported here: it pulls in torch, which nothing else here needs.
    from twofold.device.checks.self_check import find_fault

    return find_fault(devices, choice.devices, files, pool)


@dataclass(frozen=True)
class _Opened:
    """A model's files and the settings to load it, on any accelerator."""

    config: EngineConfig
    path: Path
    files: ModelFiles
    pooling: ModelPooling
    pool: ops.ThreadPool
    progress: ProgressFn | None
    prefix_store: PrefixStore | None
    share: RankShare | None

    def load(
        self,
        choice: AcceleratorChoice,
        devices: Sequence[Device] = (),
        store: _core.ExpertStore | None = None,
    ) -> EngineParts:
        """Load for `choice`. store: the experts, if they are packed already. Raises as `load_parts`."""
        config, pool, path = self.config, self.pool, self.path
        files, rules = apply_rules(config, self.files, pool, choice)
        if self.share is not None:
            files = files.from_panels(self.share)
        # Before the tokenizer: its half second of parsing leaves the other cores idle.
        residency = _residency(files, pool)
        try:
            tokenizer = _open_tokenizer(config.tokenizer, path, files)
            drafter = open_drafter_model(config, files, tokenizer)
            _report_threads(pool)
            if config.packed_cache is not None:
                # Imported here: it pulls in the model-writing code, which nothing else here needs.
                from twofold.engine.packed_cache import with_packed_cache

                cache = Path(config.packed_cache).expanduser()
                files = with_packed_cache(files, path, directory=cache, pool=pool, progress=self.progress)
                residency = residency or _residency(files, pool)
            if devices:
                # Imported here: it pulls in torch, which nothing else here needs.
                from twofold.device.loading import load_on_device

                loaded = load_on_device(
                    config,
                    files,
                    pool,
                    choice,
                    devices=devices,
                    progress=self.progress,
                    expert_devices=rules.devices,
                )
                choice = dataclasses.replace(choice, reason=f"{choice.reason}; {loaded.reason}")
            else:
                loaded = _load_on_cpu(
                    config,
                    files,
                    pool=pool,
                    choice=choice,
                    progress=self.progress,
                    rules=rules,
                    drafter=drafter,
                    store=store,
                )
            if choice.unused_gpu:
                _log.warning("bad: %s", choice.reason)
            else:
                _log.info("accelerator %s: %s", choice.label, choice.reason)
            return self._parts(choice, files, rules, loaded, tokenizer, residency, drafter)
        except BaseException:
            if residency is not None:
                residency.close()
            raise

    def _parts(
        self,
        choice: AcceleratorChoice,
        files: ModelFiles,
        rules: ModuleRules,
        loaded: LoadedRunner,
        tokenizer: Tokenizer,
        residency: Residency | None,
        drafter: OpenedDrafter | None,
    ) -> EngineParts:
        config, pool, path, moe = self.config, self.pool, self.path, loaded.runner.moe
        rules.set_kernels(moe.store)
        kv_pages = make_pool(
            config,
            files,
            loaded=loaded,
            accelerator=choice.label,
            levels=rules.levels,
            store=self.prefix_store,
        )
        model_drafter: ModelDrafter | None = None
        if loaded.mtp_runner is not None:
            model_drafter = MtpDrafter(loaded.mtp_runner, kv_pages)
        elif drafter is not None:
            model_drafter = drafter.load(loaded, choice.profile, self.progress)
        weights = MappedFiles([*files.tensors.mappings, *([files.mapped.mapping] if files.mapped else [])])
        if change := weights.change():
            raise ModelLoadError(
                f"{change} while the model was loaded; load it again when the file is complete"
            )
        return EngineParts(
            tokenizer=tokenizer,
            info=run_info(config, path, files=files, choice=choice, moe=moe, pool=pool),
            kv_pages=kv_pages,
            loaded=loaded,
            cache_state=open_cache_state(moe, config.cache_state),
            residency=residency,
            recorded=_recorded_model(path, files.config),
            drafter=model_drafter,
            pooling=self.pooling,
            bidirectional_pictures=has_bidirectional_pictures(files.config.layers),
            weights=weights,
            pictures=picture_source(config, path, files, threads=config.cpu_threads),
            adapters=loaded.adapters,
        )


def _recorded_model(path: Path, model: ModelConfig) -> RecordedModel:
    return RecordedModel(str(path), model.routed.num_experts, tuple(model.moe_layers), len(model.layers))


def _report_threads(pool: ops.ThreadPool) -> None:
    _log.info("threads: %s", pool.reason)
    if pool.num_threads > (num_cores := len(os.sched_getaffinity(0))):
        _log.warning(
            "--cpu-threads %d is more than the %d cores this process may use; threads will wait for one another",
            pool.num_threads,
            num_cores,
        )


def _residency(files: ModelFiles, pool: ops.ThreadPool) -> Residency | None:
    """Residency of mapped panels; None where they are copied to each NUMA node, because the copy reads them."""
    return None if files.mapped is None or pool.num_nodes > 1 else Residency(files.mapped)


def _open_tokenizer(requested: str | None, path: Path, files: ModelFiles) -> Tokenizer:
    """The requested tokenizer, or the model's. A GGUF file's header (a quarter of a second of parsing) is read once."""
    if requested is None and isinstance(files.tensors, GgufSource):
        return Tokenizer.from_gguf(files.tensors.file, vocab_size=files.config.vocab_size)
    return Tokenizer.open(requested or path, vocab_size=files.config.vocab_size)


def _later_bytes(config: EngineConfig, files: ModelFiles) -> int:
    """Host memory of adapters and of the picture encoder, which are loaded when they are needed."""
    elements = picture_encoder.encoder_elements(files.config, files.tensors)
    return reserved_bytes(config) + picture_encoder.encoder_bytes(elements, config, None)


def _load_on_cpu(
    config: EngineConfig,
    files: ModelFiles,
    pool: ops.ThreadPool,
    choice: AcceleratorChoice,
    progress: ProgressFn | None,
    rules: ModuleRules,
    drafter: OpenedDrafter | None,
    store: _core.ExpertStore | None,
) -> LoadedRunner:
    """Dense weights on the CPU, experts on the CPU or on an emulated accelerator."""
    model = files.config
    num_layers, num_experts = len(model.moe_layers), model.routed.num_experts
    sizes = map(model.routed.bytes_by_expert, files.expert_formats())
    largest = max(map(max, sizes), default=1)
    slot_bytes = _core.slot_stride(largest)
    slots = num_slots(config, num_layers, num_experts, slot_bytes)
    split = (
        device_split(config.tensor_split, choice.profile) if choice.profile and choice.device_names else ()
    )
    plan = slot_plan(config, files, slots, devices=rules.devices, split=split)
    check_pins(rules.devices, slots, num_layers, num_experts, is_placed=plan.placement.is_static)
    taps = () if drafter is None else drafter.target_layers
    loaded = LoadedModel(
        files, pool, progress=progress, threads=rules.threads, pools=rules.pools, tapped_layers=taps
    )
    moe = load_experts(
        files, pool, choice, config, slots=plan, progress=progress, on_cpu=rules.on_cpu, store=store
    )
    mapped_bytes = 0 if files.mapped is None or pool.num_nodes > 1 else files.mapped.contents.panels_end
    own = NO_DRAFT_MEMORY if drafter is None else drafter.memory
    later_bytes = own.weights_bytes + _later_bytes(config, files)
    capacity = plan_capacity(config, model, mapped_bytes + later_bytes, own.bytes_per_token)
    cache_dtype = model.cache_dtype(config.kv_cache_dtype)
    page_bytes = config.page_size * model.cache_bytes_per_token(cache_dtype)
    kv_cache = ops.StateCache(
        model.cache_planes(cache_dtype),
        capacity.num_pages,
        config.page_size,
        model.record_bytes,
        (num_others := (capacity.num_records or 0) + capacity.num_snapshots) + capacity.num_draft_records,
    )
    runner = ModelRunner(loaded, moe, kv_cache)
    return LoadedRunner(
        runner,
        capacity.num_pages,
        capacity.max_context,
        kv_cache,
        num_records=capacity.num_records,
        num_snapshots=capacity.num_snapshots,
        plan=host_planner(files, moe, kv_cache, page_bytes),
        page_bytes=page_bytes,
        record_bytes=sum(model.record_bytes),
        draft_records=range(num_others, num_others + capacity.num_draft_records),
        # Their results depend on when experts are resident, so a step of several tokens would change them.
        verifier=None if moe.plan.changes_outputs else runner,
        num_moe_layers=model.num_target_moe_layers,
        mtp_runner=runner.mtp_runner,
        adapters=ModelAdapters(files, loaded.adapters, moe.store, loaded.lm_head, pool),
    )


def run_info(
    config: EngineConfig,
    path: Path,
    files: ModelFiles,
    choice: AcceleratorChoice,
    moe: MoeRuntime,
    pool: ops.ThreadPool,
) -> RunInfo:
    """The run's description for display and telemetry."""
    model = files.config
    sizes = trace_sizes(files)
    return RunInfo(
        model=str(path),
        architecture=model.architecture,
        accelerator=choice.label,
        accelerator_reason=choice.reason,
        clock=choice.clock,
        policy=moe.policy if moe.num_slots else "",
        num_layers=model.num_target_moe_layers,
        num_experts=model.routed.num_experts,
        top_k=model.routed.top_k,
        num_slots=moe.num_slots,
        expert_bytes=moe.expert_bytes,
        cpu_isa=ops.isa_choice()[0],
        cpu_threads=pool.num_threads,
        version=__version__,
        host=platform.node(),
        config_json=json.dumps(dataclasses.asdict(config)),
        machine_json=machine_json(pool, choice.profile, sizes, moe.device_slots),
        output_changes=moe.output_changes,
        trace_sizes=sizes,
        context_limit_reason=model.context_limit_reason,
    )
