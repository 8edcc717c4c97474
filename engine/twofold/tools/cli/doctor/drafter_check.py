"""The doctor's check of a drafter that has a model of its own."""

from __future__ import annotations

from twofold.api.config import EngineConfig
from twofold.api.errors import TwofoldError
from twofold.tools.cli.doctor.machine_checks import Check
from twofold.weights.host_memory import available_memory_bytes

_GIB = 2**30


def check_drafter(config: EngineConfig) -> Check | None:
    """Whether the model of --speculative-config fits the target, and both fit into memory; None without one."""
    from twofold.models.model_files import open_model_files
    from twofold.models.sizing import measure_files
    from twofold.step.drafters.opening import open_drafter_model
    from twofold.text.tokenizer import Tokenizer

    try:
        files = open_model_files(config.model)
        size = measure_files(files, kv_cache_dtype=config.kv_cache_dtype)
        tokenizer = Tokenizer.open(config.tokenizer or config.model)
    except TwofoldError:
        # The check of the model reports why.
        return None
    try:
        drafter = open_drafter_model(config, files, tokenizer)
    except TwofoldError as error:
        return Check.bad("drafter", str(error), "give another draft model, or leave --speculative-config out")
    if drafter is None:
        return None
    memory, available = drafter.memory, available_memory_bytes()
    tokens = config.max_total_tokens or config.max_model_len or size.config.max_context
    own_bytes = memory.weights_bytes + memory.bytes_per_token * tokens
    needed = size.host_bytes(tokens) + own_bytes
    found = (
        f"{config.speculation.method} {config.speculation.model}: {memory.weights_bytes / _GIB:.2f} GiB of weights; "
        f"with a KV cache of {tokens} tokens model and drafter need {needed / _GIB:.2f} GiB of memory"
    )
    if needed <= available:
        return Check("drafter", "ok", found)
    return Check(
        "drafter",
        "bad",
        found,
        f"there are {available / _GIB:.2f} GiB; leave --speculative-config out or add memory",
    )
