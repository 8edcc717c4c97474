"""Opens and loads the model of a drafter that has one: checked before the target is loaded, sized with it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.blocks import ops
from twofold.blocks.head import Embedding
from twofold.experts.accelerator import AcceleratorChoice
from twofold.experts.moe import MoeRuntime
from twofold.experts.profiles import MachineProfile
from twofold.experts.slot_plan import DenseCost, SlotPlan
from twofold.models.config import CacheDType
from twofold.models.model_files import ModelFiles, ProgressFn, open_model_files
from twofold.models.sizing import measure_files
from twofold.step.drafters.draft_model import DraftModel, DraftModelDrafter
from twofold.step.drafters.draft_pages import DraftPagePool
from twofold.step.drafters.drafter import ModelDrafter
from twofold.step.drafters.eagle3 import Eagle3Drafter
from twofold.step.drafters.eagle3_head import Eagle3Files, Eagle3Head
from twofold.step.drafters.pass_times import PassTimes
from twofold.step.expert_loading import mapped_experts, moe_shape
from twofold.step.model import LoadedModel
from twofold.step.runner import LoadedRunner, ModelRunner
from twofold.text.tokenizer import Tokenizer
from twofold.text.tokenizer.comparison import first_difference

_FLAG = "--speculative-config: model"


@dataclass(frozen=True)
class DraftMemory:
    """Host memory of a drafter's model."""

    weights_bytes: int = 0
    bytes_per_token: int = 0
    """KV cache bytes. There are as many tokens as in the target's cache."""


NO_DRAFT_MEMORY = DraftMemory()


class OpenedDrafter(ABC):
    """A drafter whose files were opened and checked; no weights are read yet."""

    memory: DraftMemory

    @property
    def target_layers(self) -> tuple[int, ...]:
        """Layers of the target before which it reads the hidden states."""
        return ()

    @abstractmethod
    def load(
        self, target: LoadedRunner, profile: MachineProfile | None, progress: ProgressFn | None = None
    ) -> ModelDrafter:
        """Read the weights, allocate as many pages as the target has, and follow its steps.

        profile: that of an emulated machine, whose clock counts drafting.

        Raises:
            ModelLoadError: the model cannot be used. KernelError: memory is short.
        """


def open_drafter_model(
    config: EngineConfig, target: ModelFiles, tokenizer: Tokenizer
) -> OpenedDrafter | None:
    """The drafter's model of --speculative-config; None if its method has none.

    Raises:
        ConfigError: it does not fit the target.
        ModelLoadError: it cannot be used.
    """
    method = config.speculation.method
    if method == "draft_model":
        return OpenedDraftModel.of(config, target, tokenizer)
    return OpenedEagle3.of(config, target) if method == "eagle3" else None


@dataclass(frozen=True)
class OpenedDraftModel(OpenedDrafter):
    config: EngineConfig
    files: ModelFiles
    vocab_size: int
    """The target's."""
    memory: DraftMemory

    @classmethod
    def of(cls, config: EngineConfig, target: ModelFiles, tokenizer: Tokenizer) -> OpenedDraftModel:
        path = draft_path(config)
        files = open_model_files(path)
        if any(files.config.record_bytes):
            raise ConfigError(
                f"{_FLAG} was given {path}; {files.config.architecture} keeps a recurrent state, which rejected drafts "
                "would spoil: give a model whose layers all have attention"
            )
        difference = first_difference(tokenizer, Tokenizer.open(path))
        if difference is not None:
            raise ConfigError(
                f"{_FLAG} was given {path}, whose tokenizer is another one than the model's: {difference}; give a "
                "draft model with the same tokenizer"
            )
        size = measure_files(files, kv_cache_dtype=config.kv_cache_dtype)
        memory = DraftMemory(size.dense_bytes + size.expert_bytes, size.kv_bytes_per_token)
        return cls(config, files, target.config.vocab_size, memory)

    def load(
        self, target: LoadedRunner, profile: MachineProfile | None, progress: ProgressFn | None = None
    ) -> ModelDrafter:
        files, page_size = self.files, self.config.page_size
        pool, num_pages = target.runner.pool, target.num_pages
        model = LoadedModel(files, pool, progress=progress)
        shape = moe_shape(files)
        experts = files.expert_layers() if files.mapped is None else mapped_experts(files.mapped, shape, pool)
        stretches = shape.num_layers + 1
        moe = MoeRuntime(
            shape,
            experts,
            pool,
            AcceleratorChoice("none", "a draft model"),
            SlotPlan(0, ""),
            DenseCost([0.0] * stretches, [0.0] * stretches),
        )
        dtype = files.config.cache_dtype(self.config.kv_cache_dtype)
        cache = ops.StateCache(
            files.config.cache_planes(dtype), num_pages, page_size, files.config.record_bytes, 0
        )
        return DraftModelDrafter(
            DraftModel(model, moe, cache, self.vocab_size),
            DraftPagePool(num_pages, page_size),
            PassTimes(None if profile is None else PassTime.of_model(files, profile)),
            stops_early=self.config.speculation.adaptive,
        )


@dataclass(frozen=True)
class OpenedEagle3(OpenedDrafter):
    config: EngineConfig
    files: Eagle3Files
    memory: DraftMemory
    layers: tuple[int, ...]
    cache_dtype: CacheDType

    @property
    def target_layers(self) -> tuple[int, ...]:
        return self.layers

    @classmethod
    def of(cls, config: EngineConfig, target: ModelFiles) -> OpenedEagle3:
        path, model = draft_path(config), target.config
        files = Eagle3Files(path)
        given, own = files.config, files.config.attention.hidden_size
        sizes = {
            "target_hidden_size": (given.target_hidden_size, model.hidden_size),
            "vocab_size": (given.vocab_size, model.vocab_size),
        }
        if not files.has_embedding:
            sizes["hidden_size, of a head without an embedding,"] = own, model.hidden_size
        for name, (found, expected) in sizes.items():
            if found != expected:
                raise ConfigError(
                    f"{_FLAG} was given {path}, whose {name} is {found}; the model has {expected}: give the head that "
                    "was trained for this model"
                )
        layers = given.layers_of(model.num_layers, path)
        dtype = model.cache_dtype(config.kv_cache_dtype)
        memory = DraftMemory(files.host_bytes, given.bytes_per_token(dtype))
        return cls(config, files, memory, layers, dtype)

    def load(
        self, target: LoadedRunner, profile: MachineProfile | None, progress: ProgressFn | None = None
    ) -> ModelDrafter:
        runner, page_size = target.runner, self.config.page_size
        assert isinstance(runner, ModelRunner), "a runner without hidden states"
        drafter = Eagle3Drafter(
            Eagle3Head(self.files, runner.pool, runner.embedding),
            ops.StateCache(self.files.config.cache_planes(self.cache_dtype), target.num_pages, page_size),
            DraftPagePool(target.num_pages, page_size),
            PassTimes(None if profile is None else PassTime.of_weights(self.files, profile)),
            stops_early=self.config.speculation.adaptive,
        )
        runner.follower = drafter.follow
        return drafter


@dataclass(frozen=True)
class PassTime:
    """Time of a pass on an emulated machine's CPU: its weights are read once, and each token is computed."""

    weights_s: float
    token_s: float

    @classmethod
    def of_model(cls, files: ModelFiles, profile: MachineProfile) -> PassTime:
        """The pass of one token; an embedding's row counts nothing."""
        costs = [part.cost(weights) for part, weights in files.parts() if not isinstance(part, Embedding)]
        figures = profile.cost_figures
        return cls(
            sum(cost.num_bytes for cost in costs) / (1e9 * figures["cpu_bandwidth_gbps"]),
            sum(cost.flops for cost in costs) / (1e9 * figures["cpu_gflops"]),
        )

    @classmethod
    def of_weights(cls, files: Eagle3Files, profile: MachineProfile) -> PassTime:
        """The pass of a head: each of its weights is multiplied once per token."""
        figures = profile.cost_figures
        shapes = (spec.shape for part, spec in files.weights.specs.items() if part != "embedding")
        return cls(
            files.host_bytes / (1e9 * figures["cpu_bandwidth_gbps"]),
            2.0 * sum(map(math.prod, shapes)) / (1e9 * figures["cpu_gflops"]),
        )

    def __call__(self, num_tokens: int) -> float:
        return max(self.weights_s, num_tokens * self.token_s)


def draft_path(config: EngineConfig) -> Path:
    """The path that --speculative-config names. Raises ConfigError where there is nothing."""
    path = Path(config.speculation.model or "").expanduser()
    if not path.exists():
        raise ConfigError(
            f"{_FLAG} was given {str(path)!r}, which does not exist; give a model directory or GGUF file"
        )
    return path
