"""The MoE backend of a loaded model: packs its experts into the native store and runs its MoE layers.

Decisions and compute are native (`MoeExecutor`); this module only builds the executor and hands arrays through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from twofold import _core, ops
from twofold.config import EngineConfig
from twofold.errors import ConfigError, ModelLoadError
from twofold.experts.accelerator import AcceleratorChoice, num_slots
from twofold.model.model import LoadedModel
from twofold.model.weights import LoadProgress
from twofold.types import PlacementCounts

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


class MoeRuntime:
    """Implements `model.MoeBackend` on the native executor. One per engine; the engine thread owns it.

    Raises:
        ConfigError: unknown policy or slots out of range.
        ModelLoadError: an expert cannot be read, or memory is short.
    """

    def __init__(
        self,
        model: LoadedModel,
        team: ops.ThreadTeam,
        choice: AcceleratorChoice,
        config: EngineConfig,
        progress: Callable[[LoadProgress], None] | None = None,
    ) -> None:
        self.choice = choice
        self._model_config = model.config
        self._store = _pack_experts(model, progress)
        self.expert_bytes: int = self._store.expert_bytes
        if choice.profile is None:
            self._executor = _core.MoeExecutor(team, self._store)
        else:
            self._executor = self._make_emulated(model, team, choice, config)

    def _make_emulated(
        self, model: LoadedModel, team: ops.ThreadTeam, choice: AcceleratorChoice, config: EngineConfig
    ) -> _core.MoeExecutor:
        assert choice.profile is not None
        num_layers, num_experts = len(model.moe_layers), model.config.num_experts
        slots = num_slots(config, num_layers, num_experts)
        dense_bytes, dense_flops = _dense_cost(model)
        try:
            return _core.MoeExecutor.emulated(
                team,
                self._store,
                choice.profile.name,
                choice.profile.cost_figures,
                model.config.top_k,
                slots,
                config.policy,
                dense_bytes,
                dense_flops,
                preload=slots == num_layers * num_experts,
            )
        except ValueError as error:
            raise ConfigError(f"accelerator {choice.label}: {error}") from error

    def begin_step(self, step: int, requests: Sequence[int], positions: Sequence[int]) -> None:
        """Name the rows of the step's batch: which request and position each token is."""
        self._executor.begin_step(step, requests, positions)

    def forward(self, moe_layer: int, normed: F32, ids: I32, weights: F32, hidden: F32) -> None:
        """See `model.MoeBackend.forward`."""
        self._executor.forward(moe_layer, normed, ids, weights, hidden)

    def end_step(self) -> None:
        self._executor.end_step()

    def idle(self) -> None:
        """Nothing is left to do: background uploads land."""
        self._executor.idle()

    @property
    def virtual_now_us(self) -> float | None:
        """The virtual clock of an emulated accelerator, None in real time."""
        return self._executor.virtual_now_us

    @property
    def num_slots(self) -> int:
        return self._executor.num_slots

    @property
    def device_bytes(self) -> int:
        return self._executor.device_bytes

    def counts(self) -> PlacementCounts:
        return PlacementCounts(**self._executor.counts())

    def enable_events(self, on: bool) -> None:
        self._executor.events_enabled = on

    def drain_events(self) -> dict[str, npt.NDArray[np.void]]:
        """Structured arrays of what happened since the last call, by kind: token_layer, upload, cache_event."""
        return self._executor.drain_events()

    def take_dropped(self) -> dict[str, int]:
        """Events lost by kind since the last call, because nobody drained in time."""
        return self._executor.take_dropped()


def _pack_experts(model: LoadedModel, progress: Callable[[LoadProgress], None] | None) -> _core.ExpertStore:
    config = model.config
    num_layers = len(model.moe_layers)
    store: _core.ExpertStore | None = None
    for index, layer in enumerate(model.moe_layers):
        experts = model.expert_weights(layer)
        if store is None:
            dtype = "bfloat16" if experts[0][0].dtype == np.uint16 else "float32"
            try:
                store = _core.ExpertStore(
                    num_layers, config.num_experts, config.hidden_size, config.moe_intermediate_size, dtype
                )
            except MemoryError as error:
                raise ModelLoadError(
                    "there is not enough memory for the experts; `twofold doctor` says how much the model needs"
                ) from error
        for expert, (gate, up, down) in enumerate(experts):
            try:
                store.put(index, expert, *map(np.ascontiguousarray, (gate, up, down)))
            except ValueError as error:
                raise ModelLoadError(
                    f"layer {layer}, expert {expert}: {error}; convert the model to one dtype"
                ) from error
        if progress is not None:
            share = store.bytes // num_layers
            progress(
                LoadProgress(
                    "experts", f"layer {layer}", (index + 1) * share, store.bytes, index + 1, num_layers
                )
            )
    if store is None:
        raise ModelLoadError(
            f"{config.architecture}: the model has no layer with experts; Twofold runs MoE models"
        )
    return store


def _dense_cost(model: LoadedModel) -> tuple[list[float], list[float]]:
    """Bytes read and flops per token of what runs between MoE layers; the last entry is what follows the last one."""
    config = model.config
    element_bytes = 4 if config.dtype == "float32" else 2
    qkv_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    attention = config.hidden_size * (qkv_rows + config.num_heads * config.head_dim)
    router = config.hidden_size * config.num_experts
    dense_ffn = 3 * config.hidden_size * config.intermediate_size
    weights: list[float] = []
    pending = 0
    for layer in range(config.num_layers):
        pending += attention
        if layer in config.moe_layers:
            weights.append(pending + router)
            pending = 0
        else:
            pending += dense_ffn
    weights.append(pending + config.hidden_size * config.vocab_size)
    return [w * element_bytes for w in weights], [2.0 * w for w in weights]
