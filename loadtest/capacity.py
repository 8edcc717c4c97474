#!/usr/bin/env python3
"""Finds the highest arrival rate at which a server holds its objectives; started by `twofold loadtest capacity`.

    python loadtest/capacity.py PLAN        # PLAN: a CapacityPlan as JSON

Each measurement is an open loop of Poisson arrivals with drawn lengths. Repetition k uses the same arrival pattern and
the same lengths at every rate, so that two rates differ by the rate alone; prompts are new each time. Exit code: 0; 1
when the lowest rate misses an objective; 2 for a server that may not be loaded or does not answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from twofold.api.errors import ConfigError
from twofold.tools.loadgen.capacity import Capacity, highest_rate
from twofold.tools.loadgen.generator import Load, LoadPlan
from twofold.tools.loadgen.http_client import HttpClient, HttpStatusError, api_key, check_url, served_model
from twofold.tools.loadgen.loadtest_plan import CapacityPlan
from twofold.tools.loadgen.sample_store import SampleStore
from twofold.tools.loadgen.workload import CHAT, PromptShape, Workload, prepare

_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

from loadtest.prompts import OPENINGS  # noqa: E402

_WARM_UP_S = 3.0
_TIMEOUT_S = 120.0


@dataclass
class Measurements:
    """Loads on one server; each is one vote for or against a rate."""

    client: HttpClient
    workload: Workload
    plan: CapacityPlan
    store: SampleStore
    num_loads: int = 0

    async def holds(self, rate: float, repetition: int) -> bool:
        """Send one load and check the objectives; a failed request misses them."""
        self.num_loads += 1
        load = self._load(rate, repetition, self.plan.seconds)
        samples = list((await load.run()).samples)
        for sample in samples:
            self.store.add(sample)
        await asyncio.to_thread(self.store.flush)
        results = [slo.check(samples) for slo in self.plan.slos]
        num_failed = sum(not sample.ok for sample in samples)
        held = bool(samples) and not num_failed and all(result.met for result in results)
        shown = "; ".join(str(result).replace("  ", " ") for result in results)
        failed = f"; {num_failed} failed" if num_failed else ""
        print(
            f"  {rate:8.3f}/s  {'held  ' if held else 'missed'}  {len(samples):4} requests  {shown}{failed}"
        )
        sys.stdout.flush()
        return held

    async def warm_up(self) -> None:
        await self._load(self.plan.search.low, -1, _WARM_UP_S).run()

    def _load(self, rate: float, repetition: int, seconds: float) -> Load:
        plan = self.plan
        # Seeds that follow one another share no repetition.
        seed = 1000 * plan.seed + repetition
        shape = PromptShape(plan.input_len, plan.output_len, drawn=True, lengths_seed=seed)
        # New prompts for each load: none is in the prefix cache.
        workload = replace(self.workload, seed=1000 * (plan.seed + 1) + self.num_loads)
        load_plan = LoadPlan(
            num_prompts=max(10, int(3 * rate * seconds)),
            request_rate=rate,
            duration_s=seconds,
            fixed_count=True,
            timeout_s=_TIMEOUT_S,
            seed=seed,
            slos=plan.slos,
        )
        return Load(self.client, workload, shape, load_plan, stage=f"{rate:.3g}/s")


async def search(plan: CapacityPlan) -> tuple[Capacity, SampleStore]:
    host = check_url(plan.host, flag="--host", allow_remote=plan.allow_remote_host)
    client = HttpClient(host, api_key())
    model = plan.model or served_model(await client.json("GET", "/v1/models"))[0]
    workload = await prepare(
        client,
        path=CHAT,
        dataset="random",
        tale=" ".join(OPENINGS),
        input_len=plan.input_len,
        extra_body={"model": model, "temperature": 0.8, "ignore_eos": True},
        seed=plan.seed,
    )
    store = SampleStore(host, datetime.now().strftime("capacity-%Y%m%d-%H%M%S"), None)
    objectives = ", ".join(map(str, plan.slos))
    print(
        f"highest rate of {model} at {host} with {objectives}; each load takes {plan.seconds:g} s", flush=True
    )
    measurements = Measurements(client, workload, plan, store)
    await measurements.warm_up()
    return await highest_rate(measurements.holds, plan.search), store


def main() -> int:
    plan = CapacityPlan.from_json(sys.argv[1])
    try:
        found, store = asyncio.run(search(plan))
    except (ConfigError, OSError, ValueError, LookupError, HttpStatusError) as error:
        what = "" if isinstance(error, ConfigError) else f"no OpenAI server answers at {plan.host}: "
        print(f"twofold loadtest capacity: {what}{error}", file=sys.stderr)
        return 2
    print(f"\n{conclusion(plan, found)}\n{store.where()}")
    if plan.json_file:
        document: dict[str, Any] = {"plan": json.loads(plan.to_json()), "capacity": asdict(found)}
        Path(plan.json_file).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(found.held is None)


def conclusion(plan: CapacityPlan, found: Capacity) -> str:
    if found.held is None:
        return f"the lowest rate, {plan.search.low:g}/s, misses the objectives; give a lower --low"
    if found.missed is None:
        return f"capacity: at least {found.held:.3g} conversations per second, the --high given"
    note = "" if found.complete else f" (not narrowed further: {found.num_runs} loads are the limit)"
    return f"capacity: {found.held:.3g} conversations per second; {found.missed:.3g} missed{note}"


if __name__ == "__main__":
    sys.exit(main())
