"""Commands to the engines and parsing of their answers; interpreters that print JSON lines stand in for the peers."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from benchmarks.peers.engines import (
    IkLlamaEngine,
    LlamaEngine,
    PeerError,
    Round,
    TransformersEngine,
    TwofoldEngine,
    Workload,
    round_of,
)
from benchmarks.peers.workers.ik_worker import check_settings, settings_in

WORK = Workload(prompt_tokens=100, new_tokens=10, repeats=3, threads=2, seed=7, vocab=512)
MODEL = Path("models/m.gguf")


def bench_line(pp: float, tg: float) -> dict[str, object]:
    return {"twofold": {"prefill_tokens_per_s": pp, "decode_tokens_per_s": tg}, "cpu_isa": "avx2"}


def worker_lines(*pairs: tuple[float, float]) -> list[dict[str, object]]:
    loaded: dict[str, object] = {"load_s": 0.5, "version": "9"}
    return [loaded, *({"prefill_s": prefill, "decode_s": decode} for prefill, decode in pairs)]


def test_the_prompt_is_the_one_that_twofold_draws() -> None:
    draw = random.Random(7)
    assert WORK.prompt == [draw.randrange(512) for _ in range(100)]


def test_a_round_is_the_median_of_its_repeats() -> None:
    measured = round_of(worker_lines((1.0, 1.0), (0.5, 0.1), (2.0, 0.2)), WORK, "x")
    assert (measured.pp, measured.tg) == (100.0, 50.0)
    assert measured.details == {"load_s": 0.5, "version": "9"}


def test_twofold_is_run_on_the_file_with_the_same_prompt(fake_python, calls_of) -> None:
    python = fake_python("twofold-python", [bench_line(300.0, 20.0)])
    assert TwofoldEngine(python).measure(MODEL, WORK) == Round(300.0, 20.0, {"cpu_isa": "avx2"})
    (call,) = calls_of(python)
    assert call[:4] == ["-m", "twofold.tools.cli", "bench", str(MODEL)]
    told = dict(itertools.pairwise(call))
    # Of N + 1 new tokens the first comes out of the prompt's step, so N steps are timed.
    assert (told["--new-tokens"], told["--random-prompt"], told["--cpu-threads"]) == ("11", "7", "2")


def test_llama_tries_its_switches_once_and_keeps_the_best_for_each_test(
    tmp_path, fake_python, calls_of
) -> None:
    python = fake_python("llama-python", [])
    answers = Path(python)
    # Without flash attention its prompt is faster, without mapping its single tokens are.
    source = answers.read_text(encoding="utf-8").replace(
        "print('')",
        "task = json.loads(sys.argv[2])\n"
        "prefill = 1.0 if task['flash_attention'] else 0.5\n"
        "decode = 1.0 if task['mmap'] else 0.1\n"
        "for _ in range(task['repeats']): print(json.dumps({'prefill_s': prefill, 'decode_s': decode}))",
    )
    answers.write_text(source, encoding="utf-8")
    engine = LlamaEngine(python)
    measured = engine.measure(MODEL, WORK)
    assert (measured.pp, measured.tg) == (200.0, 100.0)
    assert measured.details["settings"]["pp"] == {"flash_attention": False, "mmap": True, "repack": True}
    assert measured.details["settings"]["tg"] == {"flash_attention": True, "mmap": False, "repack": True}
    assert len(calls_of(python)) == 4 + 2
    engine.measure(MODEL, WORK)
    assert len(calls_of(python)) == 4 + 2 + 2
    task = json.loads(calls_of(python)[-1][1])
    assert (task["prompt"], task["threads"], task["new_tokens"]) == (WORK.prompt, 2, 10)


def test_a_setting_that_ik_refuses_falls_out(tmp_path, fake_python) -> None:
    python = fake_python("ik-python", [])
    answers = Path(python)
    source = answers.read_text(encoding="utf-8").replace(
        "print('')",
        "import os\n"
        "task = json.loads(sys.argv[2])\n"
        "if task['repack']: sys.exit('no such panels')\n"
        "assert os.environ.get('IK_LLAMA_CPP_LIB_PATH') is None\n"
        "for _ in range(task['repeats']): print(json.dumps({'prefill_s': 0.5, 'decode_s': 0.1}))",
    )
    answers.write_text(source, encoding="utf-8")
    measured = IkLlamaEngine(python).measure(MODEL, WORK)
    assert measured.details["settings"]["tg"] == {"flash_attention": True, "repack": False, "fused_moe": True}
    answers.write_text(source.replace("task['repack']", "task"), encoding="utf-8")
    with pytest.raises(PeerError, match="no such panels"):
        IkLlamaEngine(python).measure(MODEL, WORK)


def test_ik_is_held_to_what_it_was_told() -> None:
    log = (
        "============ Repacked 43 tensors\n"
        "llama_init_from_model: n_batch       = 64\n"
        "llama_init_from_model: fused_moe     = 1\n"
        "llama_init_from_model: ser           = -1, 0\n"
    )
    does = settings_in(log)
    assert does == {"n_batch": 64, "fused_moe": 1, "repacked": 1}
    check_settings({"n_batch": 64, "repacked": 1}, does)
    for told in ({"fused_moe": 0}, {"flash_attn": 1}):
        with pytest.raises(RuntimeError, match=f"{next(iter(told))} = "):
            check_settings(told, does)
    assert settings_in(log.replace("43", "0"))["repacked"] == 0


@pytest.mark.parametrize("lines", [[], [{"load_s": 1.0}], [[1]], [{"twofold": None}]])
def test_an_engine_without_figures_is_an_error(fake_python, lines) -> None:
    python = fake_python("python", lines)
    for engine in (TwofoldEngine(python), TransformersEngine({MODEL: MODEL}, python)):
        with pytest.raises(PeerError, match="printed no"):
            engine.measure(MODEL, WORK)
