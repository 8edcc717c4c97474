"""The engine's interface as the server uses it. `twofold.engine.Engine` implements it; tests inject faults with another
implementation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from twofold.api.constraints import CompiledConstraint, Constraint
from twofold.api.control import ExpertPlacement, LayerPlacement, MemoryUse, Resize
from twofold.api.pooling import ModelPooling
from twofold.api.types import (
    EngineFailure,
    EngineStats,
    GenerationRequest,
    MappedWeights,
    RequestProgress,
    RunInfo,
)
from twofold.text.tokenizer import ToolForm
from twofold.text.tokenizer.shapes import Kind, Shown


class ServingTokenizer(Protocol):
    """Tokenizer and chat template. Called on worker threads, concurrently."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...

    def literal(self, text: str) -> str:
        """`text` for `encode`, with its control tokens as text."""
        ...

    @property
    def pair_frame(self) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Special tokens before, between and after two texts that are encoded as a pair."""
        ...

    def segments(self, text: str) -> list[str]:
        """`text` split into parts whose ids, concatenated, are those of the whole."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token inside a text; possibly part of a character."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids left out of an answer's text."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of the token with exactly this text."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template."""
        ...

    @property
    def tool_form(self) -> ToolForm | None:
        """The chat template's form of tool calls; None: it supports none."""
        ...

    @property
    def turn_end(self) -> str | None:
        """The control token that the chat template writes after an answer, unless the model's files declare it."""
        ...

    def shows(self, *shape: Kind) -> Shown:
        """What the chat template does with a conversation of messages of these kinds."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        ...

    @property
    def template_variables(self) -> frozenset[str]:
        """Names of the variables that the chat template uses."""
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


class ServingControl(Protocol):
    """The part of `twofold.engine.control.LiveControl` that the server exposes. All but `asleep`, `memory` and
    `requests` wait for a step to end."""

    @property
    def asleep(self) -> bool:
        """Whether the memory is freed and requests are refused."""
        ...

    def memory(self) -> MemoryUse: ...

    def requests(self) -> list[RequestProgress]: ...

    def resize(self, asked: Resize) -> object: ...

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


class ServingEngine(Protocol):
    """The part of `twofold.engine.Engine` that serving needs; every method is thread-safe."""

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
    def caches_prefixes(self) -> bool:
        """Whether prefixes of requests are cached for later ones."""
        ...

    @property
    def speculates(self) -> bool:
        """Whether all requests are drafted for, not only those with a prediction."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Most requests that run at the same time."""
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

    def live_requests(self) -> list[RequestProgress]:
        """Running requests, then waiting ones."""
        ...


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
