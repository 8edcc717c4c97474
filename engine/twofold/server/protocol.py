"""What the server asks of an engine. `twofold.engine.Engine` is the real one; tests inject faults with
another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from twofold.api.constraints import CompiledConstraint, Constraint
from twofold.api.types import (
    ExpertPlacement,
    GenerationRequest,
    LayerPlacement,
    MappedWeights,
    MemoryUse,
    PlacementCounts,
    RequestProgress,
    Resize,
    RunInfo,
)
from twofold.tokenizer import ToolForm


class ServingTokenizer(Protocol):
    """Text to token ids and conversations to prompts. Called on worker threads, several at once."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...

    def stretches(self, text: str) -> list[str]:
        """`text` in parts whose ids are those of the whole, one after the other."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token inside a text; maybe half a character."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that an answer's text leaves out."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of one token's exact text."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Its source."""
        ...

    @property
    def tool_form(self) -> ToolForm | None:
        """How the chat template takes calls of tools; None: it shows none."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        ...

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat template reads."""
        ...

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render a conversation. RequestError when the template refuses it."""
        ...


class ServingStats(Protocol):
    """A moment of the engine, for /health and /metrics."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_free_pages(self) -> int: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def num_free_records(self) -> int: ...

    @property
    def num_records(self) -> int: ...

    @property
    def prefix_cache_queries(self) -> int: ...

    @property
    def prefix_cache_hits(self) -> int: ...

    @property
    def placement(self) -> PlacementCounts: ...

    @property
    def dynamic_update(self) -> Mapping[str, int]: ...

    @property
    def decode_tokens_per_s(self) -> float: ...


class ServingControl(Protocol):
    """The part of `twofold.engine.control.LiveControl` that the server offers. All but `asleep`, `memory` and
    `requests` wait for a step to end."""

    @property
    def asleep(self) -> bool:
        """Memory was given back, and no request is taken."""
        ...

    def memory(self) -> MemoryUse: ...

    def requests(self) -> list[RequestProgress]: ...

    def resize(self, asked: Resize) -> object: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def drop_prefixes(self) -> int: ...

    def expert_placement(self) -> ExpertPlacement: ...

    def place_experts(self, resident: Sequence[Sequence[int]]) -> int: ...

    def placement(self, layers: Iterable[int] | None, top: int) -> list[LayerPlacement]: ...


class ServingRecording(Protocol):
    """The part of `twofold.engine.expert_recording.ExpertRecording` that the server offers. All block."""

    def start(self, mode: str | None) -> dict[str, Any]: ...

    def stop(self) -> dict[str, Any]: ...

    def status(self) -> dict[str, Any]: ...

    def dump(self) -> dict[str, Any]: ...


class ServingEngine(Protocol):
    """The part of `twofold.engine.Engine` that serving needs; every method is thread-safe."""

    @property
    def tokenizer(self) -> ServingTokenizer: ...

    @property
    def info(self) -> RunInfo: ...

    @property
    def max_context(self) -> int: ...

    @property
    def caches_prefixes(self) -> bool:
        """Whether anything of a request is kept for those that begin like it."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Requests that may run at the same time."""
        ...

    @property
    def control(self) -> ServingControl:
        """What whoever runs it may change."""
        ...

    @property
    def recording(self) -> ServingRecording:
        """Of routed experts."""
        ...

    @property
    def mapped_weights(self) -> MappedWeights | None: ...

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """What requests may be given as `constraint`. Blocks. RequestError where nothing can be made of it."""
        ...

    def check_room(self) -> None:
        """CapacityError where any request would be refused now."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. RequestError or CapacityError here, before anything has started."""
        ...

    def cancel(self, request_id: str) -> None: ...

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones; False if some are left after the timeout."""
        ...

    def stats(self) -> ServingStats: ...

    def live_requests(self) -> list[RequestProgress]:
        """Those that run, then those that wait."""
        ...
