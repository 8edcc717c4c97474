"""Loads a model's experts into the native store and builds their executor. Independent of dense weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from twofold import _core
from twofold.api.config import EngineConfig
from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.blocks.panels import MappedPanels
from twofold.experts.accelerator import AcceleratorChoice
from twofold.experts.device_split import check_devices
from twofold.experts.moe import MoeRuntime
from twofold.experts.output_changes import AUTO
from twofold.experts.placement import InitialPlacement, initial_placement
from twofold.experts.policies import prefetches
from twofold.experts.profiles import load_machine_profile
from twofold.experts.slot_plan import DenseCost, MoeShape, SlotPlan
from twofold.experts.spread import ExpertSpread, RankShare
from twofold.models import LoadProgress, ModelFiles, ProgressFn
from twofold.models.config import expert_limits
from twofold.models.sizing import cpu_stretches, dense_stretches

_log = logging.getLogger(__name__)


def slot_plan(
    config: EngineConfig,
    files: ModelFiles,
    slots: int,
    num_staging: int = -1,
    devices: tuple[str, ...] = (),
    split: tuple[float, ...] = (),
) -> SlotPlan:
    """Plan of `slots` expert slots over all layers, filled as configured. devices: as in `SlotPlan`.

    split: share of the slots of each device of a machine with several; empty: one device.

    Raises:
        ConfigError: the statistics cannot be used, or slots of one device were to be split.
    """
    check_devices(config, len(split))
    deferred = config.num_deferred_experts
    return SlotPlan(
        slots,
        config.policy,
        prefetches(config),
        num_staging,
        placement=_placement(config, files),
        dynamic_update_from=config.gpu_prefill_token_threshold if config.enable_dynamic_expert_update else 0,
        devices=devices,
        num_deferred=AUTO if deferred == "auto" else int(deferred),
        options=config.scheduler_options,
        split=split,
    )


def _placement(config: EngineConfig, files: ModelFiles) -> InitialPlacement:
    model = files.config
    return initial_placement(
        config,
        model.moe_layers,
        model.routed.num_experts,
        num_mtp_layers=len(model.moe_layers) - model.num_target_moe_layers,
    )


def expert_spread(config: EngineConfig, files: ModelFiles) -> ExpertSpread | None:
    """Which rank holds each expert of the model; None where this process holds all experts that it computes.

    Raises:
        ConfigError: the statistics cannot be used, or are missing.
    """
    if not isinstance(files.panels, RankShare):
        return None
    model = files.config
    return files.panels.spread(
        len(model.moe_layers), model.routed.num_experts, _placement(config, files).counts
    )


def moe_shape(files: ModelFiles) -> MoeShape:
    """The shape of a model's routed experts; a dense model's has no layers and one expert, which is nowhere."""
    routed = files.config.routed
    return MoeShape(
        num_layers=len(files.config.moe_layers),
        num_experts=max(1, routed.num_experts),
        top_k=max(1, routed.top_k),
        hidden=routed.hidden_size,
        intermediate=max(1, routed.intermediate_size),
        formats=files.expert_formats(),
        activation=routed.activation,
        biases=routed.biases,
        limits=expert_limits(files.config.layers),
        second_half=routed.second_half,
    )


def open_mapped_experts(panels: MappedPanels, shape: MoeShape) -> _core.ExpertStore:
    """The experts of a panel file. Raises ModelLoadError if their shape differs from the model's."""
    stored = panels.contents.experts
    sizes = (len(stored.formats), stored.num_experts, stored.hidden, stored.intermediate_sizes)
    # A file may have an MTP layer that is not run.
    num_layers = shape.num_layers if len(stored.formats) == shape.num_layers + 1 else len(stored.formats)
    found = (num_layers, *sizes[1:], stored.formats[:num_layers], stored.biases)
    expected_sizes = (shape.num_layers, shape.num_experts, shape.hidden, shape.intermediate_sizes)
    expected = (*expected_sizes, shape.formats, shape.biases)
    if found != expected:
        raise ModelLoadError(
            f"{panels.path}: holds experts (layers, experts, hidden, intermediate, formats, biases) {found}, expected "
            f"{expected} from the model's configuration; pack the model again with `twofold pack MODEL OUT`"
        )
    return panels.experts(shape.activation, num_layers, shape.limits)


def mapped_experts(panels: MappedPanels, shape: MoeShape, pool: ops.ThreadPool) -> _core.ExpertStore:
    """The experts of a panel file, copied if the pool's threads are on several memory nodes."""
    store = open_mapped_experts(panels, shape)
    if pool.num_nodes == 1:
        return store
    _log.warning(
        "%s: panels are copied, not mapped, because they are spread over %d memory nodes; --numa off maps them",
        panels.path,
        pool.num_nodes,
    )
    return store.copied(pool)


def load_experts(
    files: ModelFiles,
    pool: ops.ThreadPool,
    choice: AcceleratorChoice,
    config: EngineConfig,
    slots: SlotPlan,
    progress: ProgressFn | None = None,
    on_cpu: Sequence[bool] = (),
    store: _core.ExpertStore | None = None,
) -> MoeRuntime:
    """Pack the model's experts and build their executor. Raises as `MoeRuntime`.

    on_cpu: per part of `ModelFiles.parts`, whether the CPU computes it beside an emulated accelerator; empty: none.
    store: the experts, if they are packed already.
    """
    moe_layers = files.config.moe_layers
    shape = moe_shape(files)
    spread = expert_spread(config, files)

    def report(layers_done: int, bytes_done: int, bytes_total: int) -> None:
        if progress is not None:
            layer = f"layer {moe_layers[layers_done - 1]}"
            progress(
                LoadProgress(
                    "experts",
                    layer,
                    bytes_done,
                    bytes_total,
                    steps_done=layers_done,
                    steps_total=shape.num_layers,
                )
            )

    if store is None and files.mapped is not None:
        store = mapped_experts(files.mapped, shape, pool)
    return MoeRuntime(
        shape,
        files.expert_layers(reads_ahead=spread is None) if store is None else store,
        pool,
        choice,
        slots=slots,
        dense_cost=DenseCost(
            *dense_stretches(files, on_cpu),
            on_cpu=cpu_stretches(files, on_cpu) if any(on_cpu) else ([], [], []),
        ),
        progress=report,
        machine=load_machine_profile(config.machine_profile),
        spread=spread,
    )
