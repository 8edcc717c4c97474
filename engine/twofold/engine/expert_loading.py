"""A model's experts from its files into the native store, and what runs them. Knows of no dense weights."""

from __future__ import annotations

from twofold.api.config import EngineConfig
from twofold.blocks import ops
from twofold.experts.accelerator import AcceleratorChoice
from twofold.experts.moe import DenseCost, MoeRuntime, MoeShape, SlotPlan
from twofold.experts.policies import prefetches
from twofold.experts.profiles import load_machine_profile
from twofold.models import LoadProgress, ModelFiles, ProgressFn
from twofold.models.sizing import dense_stretches


def slot_plan(config: EngineConfig, slots: int, num_staging: int = -1) -> SlotPlan:
    """So many expert slots over all layers under the configuration's policy."""
    return SlotPlan(slots, config.policy, prefetches(config), num_staging)


def moe_shape(files: ModelFiles) -> MoeShape:
    """The routed part of a model."""
    routed = files.config.routed
    return MoeShape(
        num_layers=len(files.config.moe_layers),
        num_experts=routed.num_experts,
        top_k=routed.top_k,
        hidden=routed.hidden_size,
        intermediate=routed.intermediate_size,
        formats=files.expert_formats(),
    )


def load_experts(
    files: ModelFiles,
    pool: ops.ThreadPool,
    choice: AcceleratorChoice,
    config: EngineConfig,
    slots: SlotPlan,
    progress: ProgressFn | None = None,
) -> MoeRuntime:
    """Pack the model's experts and build what runs them. Raises as `MoeRuntime`."""
    moe_layers = files.config.moe_layers
    shape = moe_shape(files)

    def report(layers_done: int, bytes_done: int, bytes_total: int) -> None:
        if progress is not None:
            layer = f"layer {moe_layers[layers_done - 1]}"
            progress(LoadProgress("experts", layer, bytes_done, bytes_total, layers_done, shape.num_layers))

    return MoeRuntime(
        shape,
        files.expert_layers(),
        pool,
        choice,
        slots,
        DenseCost(*dense_stretches(files)),
        report,
        load_machine_profile(config.machine_profile),
    )
