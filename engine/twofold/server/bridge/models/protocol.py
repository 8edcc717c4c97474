"""The engine's interface as the server uses it. `twofold.engine.Engine` implements it; tests inject faults with another
implementation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from twofold.api.config import EngineConfig
from twofold.api.constraints import CompiledConstraint, Constraint
from twofold.api.control import ExpertPlacement, LayerPlacement, MemoryUse, Resize
from twofold.api.media import PromptMedia
from twofold.api.pooling import ModelPooling
from twofold.api.types import (
    EngineFailure,
    EngineStats,
    GenerationRequest,
    LoadedAdapter,
    MappedWeights,
    RequestProgress,
    RunInfo,
)
from twofold.text.tokenizer import Tokenizer
from twofold.vision.prompt_pictures import PictureEncoding
from twofold.vision.service import PictureStats

ServingTokenizer = Tokenizer
"""Called on worker threads, concurrently."""


class ServingControl(Protocol):
    """The part of `twofold.engine.control.LiveControl` that the server exposes. All but `asleep`, `memory` and
    `requests` wait for a step to end."""

    @property
    def asleep(self) -> bool:
        """Whether the memory is freed and requests are refused."""
        ...

    def memory(self) -> MemoryUse: ...

    def requests(self) -> list[RequestProgress]:
        """Running requests, then waiting ones."""
        ...

    def resize(self, requested: Resize) -> object: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def drop_prefixes(self) -> int: ...

    def prefix_labels(self) -> list[bytes]: ...

    def expert_placement(self) -> ExpertPlacement: ...

    def place_experts(self, resident: Sequence[Sequence[int]]) -> int: ...

    def placement(self, layers: Iterable[int] | None, top: int) -> list[LayerPlacement]: ...


class ServingRecording(Protocol):
    """The part of `twofold.engine.expert_recording.ExpertRecording` that the server exposes. All methods block."""

    def start(self, mode: str | None) -> dict[str, Any]: ...

    def stop(self) -> dict[str, Any]: ...

    def status(self) -> dict[str, Any]: ...

    def dump(self) -> dict[str, Any]: ...


AdapterParts = tuple[tuple[str, float], ...]
"""Names of adapters, each with the scale of its change."""


class ListedAdapter(Protocol):
    """An adapter that requests may name."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def number(self) -> int:
        """Its id in llama.cpp's API."""
        ...

    @property
    def scale(self) -> float:
        """Scale of its change in requests that name no adapter."""
        ...

    @property
    def loaded(self) -> LoadedAdapter | None:
        """None: it is read when a request names it."""
        ...


class ServingAdapters(Protocol):
    """The part of `twofold.engine.adapters.Adapters` that the server needs; `load`, `unload` and `hold` block."""

    @property
    def scales(self) -> AdapterParts:
        """Adapters that change requests that name none."""
        ...

    def known(self) -> Sequence[ListedAdapter]: ...

    def set_scales(self, scales: Mapping[str, float]) -> None: ...

    def load(self, name: str, path: Path) -> LoadedAdapter: ...

    def unload(self, name: str) -> None: ...

    def hold(self, parts: AdapterParts) -> LoadedAdapter: ...

    def hold_loaded(self, parts: AdapterParts) -> LoadedAdapter | None: ...

    def release(self, adapter: LoadedAdapter) -> None: ...


class ServingPictures(PictureEncoding, Protocol):
    """The part of `twofold.vision.service.PictureService` that the server needs."""

    def stats(self) -> PictureStats: ...


class ServingEngine(Protocol):
    """The part of `twofold.engine.Engine` that serving needs; every method is thread-safe."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def tokenizer(self) -> ServingTokenizer: ...

    @property
    def info(self) -> RunInfo: ...

    @property
    def max_context(self) -> int: ...

    @property
    def pooling(self) -> ModelPooling:
        """How the model pools hidden states."""
        ...

    @property
    def speculates(self) -> bool:
        """Whether all requests are drafted for, not only those with a prediction."""
        ...

    @property
    def control(self) -> ServingControl:
        """Controls for the server's operator."""
        ...

    @property
    def recording(self) -> ServingRecording:
        """Recording of routed experts."""
        ...

    @property
    def adapters(self) -> ServingAdapters:
        """LoRA adapters that requests may use."""
        ...

    @property
    def pictures(self) -> ServingPictures | None:
        """Encoder of pictures; None: the model reads text only."""
        ...

    @property
    def mapped_weights(self) -> MappedWeights | None: ...

    @property
    def failure(self) -> EngineFailure | None:
        """Set once a GPU has failed or a file of weights was changed."""
        ...

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Compile `constraint` for requests. Blocks. RequestError when it cannot be compiled."""
        ...

    def check_room(self) -> None:
        """Raise CapacityError or UnusableEngineError if any request would be refused now."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises RequestError or CapacityError before anything has started."""
        ...

    def cancel(self, request_id: str) -> None: ...

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones; False if some are left after the timeout."""
        ...

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for the engine."""

    token_ids: tuple[int, ...]
    text: str | None = None
    """Prompt text, if `echo` asks for it."""
    opens_reasoning: bool = False
    """Whether the answer begins inside the model's thinking."""
    closes_reasoning: bool = False
    """Whether thinking is off, or over where the answer begins: a constrained answer has none."""
    turn_ends: tuple[int, ...] = ()
    """See `GenerationRequest.turn_ends`."""
    prediction: tuple[int, ...] = ()
    """See `GenerationRequest.prediction`."""
    media: PromptMedia | None = None
    """See `GenerationRequest.media`."""

    @property
    def image_tokens(self) -> int:
        return 0 if self.media is None else self.media.num_tokens
