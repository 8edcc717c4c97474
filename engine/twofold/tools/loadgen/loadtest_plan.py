"""A load test, and a search for capacity: all that their processes must know, as JSON on the command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal

from twofold.api.config import DEFAULT_URL
from twofold.tools.loadgen.capacity import Search
from twofold.tools.loadgen.shapes import Stage, stages
from twofold.tools.loadgen.slo import Slo


@dataclass(frozen=True)
class Spread:
    """Processes of a load test, by the names of Locust's options."""

    role: Literal["local", "master", "worker"] = "local"
    processes: int = 0
    """Workers that a master starts on its machine."""
    expect_workers: int = 0
    """Further workers that a master waits for."""
    host: str = "127.0.0.1"
    """Address that a master listens at, or that a worker connects to."""
    port: int = 0
    """0: a free one, for workers of the same machine."""
    wait_s: float = 60.0

    @property
    def workers(self) -> int:
        return self.processes + self.expect_workers


@dataclass(frozen=True)
class LoadTestPlan:
    """Users, load over time, and objectives of the server."""

    host: str = DEFAULT_URL
    model: str = ""
    """Requested model; empty: the first that the server lists."""
    mix: dict[str, int] = field(default_factory=lambda: {"chat": 1})
    """Weights by kind of user."""
    users: int = 10
    """Most users of the closed loop."""
    rate: float | None = None
    """Highest arrival rate of the open loop, conversations per second; None: closed loop."""
    shape: str = "constant"
    seconds: float = 60.0
    spawn_rate: float = 2.0
    max_output_tokens: int = 128
    seed: int = 0
    slos: tuple[Slo, ...] = ()
    output: str = "."
    """Directory for samples that the server does not store."""
    json_file: str = ""
    """Receives figures and samples; empty: none."""
    allow_remote_host: bool = False
    spread: Spread = field(default_factory=Spread)

    @property
    def user_stages(self) -> tuple[Stage, ...]:
        return stages(self.shape, self.users, self.seconds)

    @property
    def arrival_stages(self) -> tuple[Stage, ...]:
        """Stages of the open loop; the names and times are those of `user_stages`."""
        return stages(self.shape, self.rate or 1.0, self.seconds)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def facts_json(self) -> str:
        """What readers of a recorded test need, as JSON: no address and no path."""
        names = ("mix", "users", "rate", "shape", "seconds", "seed", "max_output_tokens", "slos")
        return json.dumps({name: asdict(self)[name] for name in names})

    @classmethod
    def from_json(cls, text: str) -> LoadTestPlan:
        """The inverse of `to_json`."""
        given = json.loads(text)
        slos = tuple(Slo(**slo) for slo in given["slos"])
        return cls(**given | {"slos": slos, "spread": Spread(**given["spread"])})


@dataclass(frozen=True)
class CapacityPlan:
    """A search for the highest arrival rate that holds the objectives."""

    slos: tuple[Slo, ...]
    search: Search
    host: str = DEFAULT_URL
    model: str = ""
    seconds: float = 20.0
    """Time in which one measurement starts requests."""
    input_len: int = 512
    """Most tokens of a prompt; lengths are drawn."""
    output_len: int = 128
    """Most tokens of an answer; lengths are drawn."""
    seed: int = 0
    json_file: str = ""
    allow_remote_host: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CapacityPlan:
        """The inverse of `to_json`."""
        given = json.loads(text)
        slos = tuple(Slo(**slo) for slo in given["slos"])
        return cls(**given | {"slos": slos, "search": Search(**given["search"])})
