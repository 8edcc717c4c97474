"""What generate, chat, bench and doctor print, in-process on a tiny random model."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import twofold
from twofold.api.config import EngineConfig
from twofold.models.bundled import bundled_model_path
from twofold.models.model_files import open_model_files
from twofold.models.sizing import measure_files
from twofold.tools.cli.doctor import machine_checks, memory_table
from twofold.tools.cli.main import main

from tests.tiny_models.writing import TinyModel, tiny_weights, write_tiny_model, write_weights

EMULATED = ("--accelerator", "emulated:rtx4090-pcie4", "--gpu-experts-ratio", "0.25", "--cpu-threads", "1")
NONE = ("--accelerator", "none", "--cpu-threads", "1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


def generate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["generate", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_generate_json_has_exactly_its_shape(tiny, capsys):
    printed = generate(capsys, tiny, "--prompt", "the fox", "--seed", "0", "--max-tokens", "9", *EMULATED)
    assert [*printed] == [
        "text",
        "token_ids",
        "accelerator",
        "output_changes",
        "placement",
        "timings",
        "usage",
    ]
    assert " ".join(printed["placement"]) == "hits cpu_misses fetched uploads evictions h2d_bytes deferred"
    assert list(printed["timings"]) == ["clock", "prefill_ms", "decode_ms", "decode_tokens_per_s"]
    assert list(printed["usage"]) == ["prompt_tokens", "completion_tokens"]
    assert printed["accelerator"] == "emulated:rtx4090-pcie4"
    assert printed["timings"]["clock"] == "virtual"
    assert len(printed["token_ids"]) == printed["usage"]["completion_tokens"] == 9
    # Every token but the last went through all three layers, two experts each.
    routed = 3 * 2 * (printed["usage"]["prompt_tokens"] + 8)
    placement = printed["placement"]
    assert placement["hits"] + placement["cpu_misses"] + placement["fetched"] == routed
    rate = printed["timings"]["decode_tokens_per_s"]
    assert rate == pytest.approx(8 / (printed["timings"]["decode_ms"] / 1e3))


def test_the_text_does_not_depend_on_the_accelerator(tiny, capsys):
    prompt = ("--prompt", "the fox", "--seed", "0", "--max-tokens", "40")
    emulated = generate(capsys, tiny, *prompt, *EMULATED)
    plain = generate(capsys, tiny, *prompt, *NONE)
    assert emulated["token_ids"] == plain["token_ids"]
    assert emulated["text"] == plain["text"]
    assert plain["timings"]["clock"] == "wall"
    assert plain["placement"]["uploads"] == 0
    assert emulated["placement"]["uploads"] > 0


def test_the_seed_decides(tiny, capsys):
    texts = [
        generate(
            capsys, tiny, "--prompt", "a", "--seed", seed, "--temperature", "1", "--max-tokens", "20", *NONE
        )["text"]
        for seed in ("1", "1", "2")
    ]
    assert texts[0] == texts[1] != texts[2]


def test_one_token_has_no_decode_rate(tiny, capsys):
    printed = generate(capsys, tiny, "--prompt", "a", "--max-tokens", "1", *NONE)
    assert printed["timings"]["decode_tokens_per_s"] is None


def test_raw_leaves_the_chat_template_out(tiny, capsys):
    flags = ("--prompt", "the fox", "--max-tokens", "1", *NONE)
    templated = generate(capsys, tiny, *flags)["usage"]["prompt_tokens"]
    with_system = generate(capsys, tiny, *flags, "--system", "be brief")["usage"]["prompt_tokens"]
    assert generate(capsys, tiny, *flags, "--raw")["usage"]["prompt_tokens"] < templated < with_system


def test_generate_prints_the_same_text_and_what_is_emulated(tiny, capsys):
    flags = (tiny, "--prompt", "the fox", "--seed", "0", "--max-tokens", "12", *EMULATED)
    text = generate(capsys, *flags)["text"]
    assert main(["generate", *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out == text + "\n"
    assert "emulated" in captured.err


class TerminalInput(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_prompt_can_come_through_a_pipe(tiny, capsys, monkeypatch):
    flags = (tiny, "--seed", "0", "--max-tokens", "5", *NONE)
    monkeypatch.setattr("sys.stdin", io.StringIO("the fox"))
    piped = generate(capsys, *flags, "--prompt", "-")
    # Without --prompt, and with the mark that some editors put in front of a file.
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffthe fox"))
    assert generate(capsys, *flags)["text"] == piped["text"]
    assert generate(capsys, *flags, "--prompt", "the fox")["text"] == piped["text"]


def test_no_command_waits_for_a_prompt_at_a_terminal(tiny, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", TerminalInput())
    assert main(["generate", tiny, *NONE]) == 2
    assert "no prompt was given; use --prompt TEXT" in capsys.readouterr().err


def test_threads_beyond_the_cores_work_and_are_warned_of(tiny, capsys, caplog):
    cores = len(os.sched_getaffinity(0))
    flags = ("--prompt", "a", "--max-tokens", "1", "--accelerator", "none")
    generate(capsys, tiny, *flags, "--cpu-threads", str(cores))
    assert not [r for r in caplog.records if "more than the" in r.message]
    generate(capsys, tiny, *flags, "--cpu-threads", str(cores + 1))
    assert f"--cpu-threads {cores + 1} is more than the {cores} cores" in caplog.text


def test_chat_keeps_its_history_until_reset(tiny, capsys, monkeypatch):
    def converse(*lines: str) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert main(["chat", tiny, "--temperature", "0", "--max-tokens", "8", *NONE]) == 0
        return capsys.readouterr().out.split("\n")

    first, second, rest = converse("the fox", "the fox")
    assert rest == ""
    assert first != second
    assert converse("the fox", "/reset", "the fox")[:3] == [first, "(forgotten)", first]


def test_chat_runs_its_commands(tiny, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("/help\n/dance\n\n"))
    assert main(["chat", tiny, *NONE]) == 0
    reported = capsys.readouterr().out
    assert "/reset" in reported
    assert "there is no /dance" in reported


def test_chat_forgets_the_oldest_turns_when_the_context_is_full(tiny, capsys, monkeypatch):
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("the king and the queen\n" * 8 + "word " * 300 + "\nthe fox\n")
    )
    assert main(["chat", tiny, "--temperature", "0", "--max-tokens", "12", *NONE]) == 0
    reported = capsys.readouterr().out
    assert "oldest turns)" in reported
    # A line that can never fit is refused and the conversation goes on.
    assert "Shorten the prompt" in reported


def test_chat_in_a_terminal_reports_speed_and_hit_rate(tiny, capsys, monkeypatch):
    typed = iter(["the fox", EOFError])

    def next_message(prompt: str) -> str:
        message = next(typed)
        if isinstance(message, str):
            return message
        raise message

    monkeypatch.setattr("sys.stdin", TerminalInput())
    monkeypatch.setattr("builtins.input", next_message)
    assert main(["chat", tiny, "--max-tokens", "8", "--temperature", "0", *EMULATED]) == 0
    assert re.search(
        r"\n\(\d tokens, [\d.]+ tokens/s \(emulated\), experts hit \d+%", capsys.readouterr().out
    )


class Terminal:
    """A `twofold chat` on a pseudo-terminal."""

    def __init__(self, model: str, *flags: str) -> None:
        self._master, slave = pty.openpty()
        environment = os.environ | {"PYTHONPATH": str(Path(twofold.__file__).parents[1]), "TERM": "dumb"}
        command = [sys.executable, "-m", "twofold.tools.cli", "chat", model, *NONE, *flags]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            # A job in the background of a script inherits Ctrl-C ignored, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        os.close(slave)
        self._unread = ""

    def read_until(self, pattern: str) -> None:
        """Wait until the terminal has shown what the regular expression asks for, and drop it."""
        deadline = time.monotonic() + 120
        while (match := re.search(pattern, self._unread)) is None:
            ready, _, _ = select.select([self._master], [], [], 60)
            assert ready, f"nothing like {pattern!r} in {self._unread!r}"
            assert time.monotonic() < deadline, f"nothing like {pattern!r} in {self._unread[-1000:]!r}"
            self._unread += os.read(self._master, 4096).decode(errors="replace")
        self._unread = self._unread[match.end() :]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_in_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(tmp_path):
    # The answer does not end before it is stopped: the context is long, and a token whose logit is always 0 is
    # never the likeliest, so the end-of-text tokens (0 and 2) are not generated.
    shape = TinyModel(max_position_embeddings=60_000)
    model = write_tiny_model(tmp_path / "endless", shape)
    weights = tiny_weights(shape)
    weights["lm_head.weight"][[0, 2]] = 0.0
    write_weights(model, weights, dtype="float32")
    terminal = Terminal(str(model), "--temperature", "0", "--max-total-tokens", "60000")
    try:
        terminal.read_until("Ctrl-D   leave")
        terminal.read_until("\n> ")
        terminal.type("the fox\n")
        # The echo of the line, and then the answer's first visible character.
        terminal.read_until(r"the fox\r?\n\s*\S")
        terminal.interrupt()
        terminal.read_until(r"\(stopped\)")
        terminal.read_until("\n> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()


def test_ctrl_c_at_the_prompt_prints_how_to_exit(tiny, capsys, monkeypatch):
    typed = iter([KeyboardInterrupt, EOFError])

    def interrupted(prompt: str) -> str:
        raise next(typed)

    monkeypatch.setattr("sys.stdin", TerminalInput())
    monkeypatch.setattr("builtins.input", interrupted)
    assert main(["chat", tiny, *NONE]) == 0
    assert "(Ctrl-D leaves)" in capsys.readouterr().out


@pytest.fixture
def torch_has_two_threads():
    """Without it torch has as many as the process of tests leaves it, or the test before."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("torch_has_two_threads")
def test_bench_measures_and_compares(tiny, capsys):
    flags = ("--prompt-tokens", "16", "--new-tokens", "8", "--repeats", "2", *EMULATED)
    assert main(["bench", tiny, "--json", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["twofold"]["decode_tokens_per_s"] > 0
    assert result["twofold"]["clock"]["name"] == "virtual"
    assert result["transformers"]["decode_tokens_per_s"] > 0
    assert result["decode_ratio"] > 0
    assert len(result["transformers"]["trial_decode_tokens_per_s"]) >= 2


def test_bench_compares_drafts_with_none(capsys):
    model = str(bundled_model_path())
    config = '{"method": "mtp", "num_speculative_tokens": 2, "adaptive": false}'
    lengths = ("--prompt-tokens", "16", "--new-tokens", "24", "--repeats", "2", "--no-compare-transformers")
    flags = (*lengths, "--no-ceilings", "--no-profile", "--speculative-config", config, *NONE)
    assert main(["bench", model, "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)["speculation"]
    first, second = found["accepted_by_position"]
    assert 1 >= first >= second > 0
    # Two answers of 23 decoded tokens; a step yields one token and what it accepts of two drafts.
    assert 1 < found["tokens_per_step"] <= 3
    assert found["num_drafts"] <= 2 * 23
    assert found["off"]["decode_tokens_per_s"] > 0 < found["speed_ratio"]
    assert main(["bench", model, *flags]) == 0
    assert "with drafts / without" in capsys.readouterr().out


BRIEF = (
    *("--prompt-tokens", "16", "--new-tokens", "4", "--repeats", "1"),
    *("--no-compare-transformers", "--no-ceilings", "--no-profile"),
)


def test_bench_takes_several_lengths_of_prompts(tiny, capsys):
    flags = (*BRIEF, "--prompt-tokens", "16,24", "--new-tokens", "8", "--json", *NONE)
    assert main(["bench", tiny, *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    named = [(test["test"], test["prompt_tokens"]) for test in result["tests"]]
    assert named == [("pp16", 16), ("tg8", 16), ("pp24", 24), ("tg8", 24)]
    assert {test["engine"] for test in result["tests"]} == {"twofold"}
    assert result["tests"][0]["tokens_per_s"] == result["twofold"]["prefill_tokens_per_s"]


def test_bench_measures_after_a_context(tiny, capsys):
    flags = (*BRIEF, "--new-tokens", "8", "--repeats", "2", "--depth", "200", *NONE)
    assert main(["bench", tiny, *flags, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [test["test"] for test in result["tests"]] == ["pp16 @ d200", "tg8 @ d200"]
    # Prefill counts what the cache did not hold: the prompt and at most a page of the context.
    speed = result["twofold"]
    read = speed["prefill_ms"] * 1e-3 * speed["prefill_tokens_per_s"]
    assert 15.9 < read < 16.1 + 64
    assert main(["bench", tiny, *flags]) == 0
    assert "16 + 8 tokens after 200" in capsys.readouterr().out
    assert main(["bench", tiny, *flags, "--compare-transformers"]) == 2
    assert "keeps no context" in capsys.readouterr().err
    assert main(["bench", tiny, *flags, "--depth", "3"]) == 2
    assert "--depth was given 3, of which the cache kept 0" in capsys.readouterr().err


def test_bench_refuses_an_answer_that_comes_at_once(tiny, capsys, monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: 1.0)
    assert main(["bench", tiny, *BRIEF, *NONE]) == 2
    assert "--new-tokens was given 4" in capsys.readouterr().err


def test_bench_for_people(tiny, capsys):
    flags = (
        "--prompt-tokens",
        "16",
        "--new-tokens",
        "8",
        "--repeats",
        "1",
        "--no-compare-transformers",
        *EMULATED,
    )
    assert main(["bench", tiny, *flags]) == 0
    reported = capsys.readouterr().out
    assert "virtual clock" in reported
    assert "not compared" in reported


def test_bench_draws_random_prompts_from_a_seed(tiny):
    import random
    from types import SimpleNamespace

    from twofold.tools.cli.bench.prompts import prompt_of

    engine = SimpleNamespace(max_context=64, vocab_size=97)
    draw = random.Random(5)
    assert prompt_of(engine, 20, 5) == [draw.randrange(97) for _ in range(20)]
    assert prompt_of(engine, 20, 5) != prompt_of(engine, 20, 6)
    assert main(["bench", tiny, "--random-prompt", "5", *BRIEF, *NONE]) == 0


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict]]:
    code = main(["doctor", *arguments, "--port", "0", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is (code == 0)
    return code, {check["name"]: check for check in report["checks"]}


def test_doctor_checks_everything_it_names(tiny, capsys):
    code, checks = doctor(capsys, tiny, *NONE)
    assert code == 0
    assert set(checks) == {
        "CPU",
        "memory",
        "accelerator",
        "model",
        "chat",
        "embeddings",
        "disk",
        "port",
        "SQLite",
        "extras",
    }
    assert "Qwen3MoeForCausalLM" in checks["model"]["found"]


def test_doctor_reports_the_models_tool_calls_and_reasoning(tmp_path, capsys):
    model = write_tiny_model(tmp_path / "m", TinyModel())
    reported = '{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call>{"name": … </think> #}'
    shows = reported + "{% for m in messages %}{{ m.tool_calls | default([]) | tojson }}{% endfor %}"
    for template, flags, verdict, found in (
        (shows, (), "ok", "calls of tools: hermes; thinking: qwen3 (<think> … </think>)"),
        (shows, ("--reasoning-parser", "none"), "ok", "calls of tools: hermes; thinking: none"),
        (reported, (), "note", "its template does not render calls of earlier turns"),
        ("{{ messages[0].content }}", (), "note", "its template has no known form of tool calls"),
        (None, (), "note", "the model has no chat template"),
    ):
        settings = {"eos_token": "<|im_end|>"} | ({"chat_template": template} if template else {})
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
        code, checks = doctor(capsys, str(model), *NONE, *flags)
        assert (code, checks["chat"]["verdict"]) == (0, verdict)
        assert found in checks["chat"]["found"]


def test_doctor_proposes_changes_when_the_model_does_not_fit(tiny, capsys, monkeypatch):
    monkeypatch.setattr(machine_checks, "available_memory_bytes", lambda: 100 * 2**20)
    code, checks = doctor(capsys, tiny, *NONE)
    assert code == 1
    assert checks["model"]["verdict"] == "bad"
    assert "does not fit" in checks["model"]["remedy"]


@pytest.mark.parametrize(
    ("flags", "name"),
    [(("/no/such/model",), "model"), (("--accelerator", "cuda"), "accelerator")],
)
def test_doctor_reports_instead_of_failing(capsys, flags, name):
    if name == "accelerator":
        from twofold.device.finding import find_device

        if find_device()[0] is not None:
            pytest.skip("there is a CUDA device here")
    code, checks = doctor(capsys, *flags)
    assert code == 1
    assert checks[name]["verdict"] == "bad"
    assert all(check["remedy"] for check in checks.values() if check["verdict"] != "ok")


@pytest.mark.parametrize(
    ("version", "verdict"),
    [((3, 6, 23), "ok"), ((3, 40, 1), "note"), ((3, 51, 2), "note"), ((3, 51, 3), "ok")],
)
def test_doctor_detects_sqlite_versions_with_the_wal_reset_bug(monkeypatch, version, verdict):
    monkeypatch.setattr("sqlite3.sqlite_version_info", version)
    assert machine_checks.check_sqlite().verdict == verdict


def test_doctor_detects_a_taken_port_and_a_missing_directory(tmp_path):
    import socket

    from twofold.api.config import ServerConfig

    with socket.create_server(("127.0.0.1", 0)) as other:
        check = machine_checks.check_port(ServerConfig(port=other.getsockname()[1]))
    assert check.verdict == "note"
    assert machine_checks.check_disk(f"sqlite:///{tmp_path}/t.db").verdict == "ok"
    assert machine_checks.check_disk("sqlite:////no/such/place/t.db").verdict == "bad"


def test_doctor_for_people(tiny, capsys):
    assert main(["doctor", tiny, *NONE, "--port", "0"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == " ".join(["ready: twofold serve", tiny, *NONE, "--port 0"])
    assert len([line for line in printed.splitlines() if line.endswith("100 %")]) == 1  # one context length


def test_what_fits_by_context(tmp_path, monkeypatch):
    config = EngineConfig(
        model=str(write_tiny_model(tmp_path / "m", TinyModel(max_position_embeddings=40_000)))
    )
    files = open_model_files(config.model)
    size = measure_files(files)
    monkeypatch.setattr(memory_table, "available_memory_bytes", lambda: size.host_bytes(16_384))
    experts = size.one_expert_bytes * size.num_experts_total
    # Cards so small that the first holds no KV cache of any context, and the last everything.
    monkeypatch.setattr(memory_table, "_GIB", (size.device_dense_bytes + experts + 10**9) // 8)
    monkeypatch.setattr(memory_table, "CARDS_GIB", (1, 8, 80))
    rows = memory_table.memory_table(files, config)
    assert [row.tokens for row in rows] == [4096, 16_384, 40_000]
    assert [row.fits for row in rows] == [True, True, False]
    for row in rows:
        assert row.kv_bytes == row.tokens * 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, their width, float32
        assert (row.experts_on_card[1], row.experts_on_card[80]) == (None, 1.0)
    assert rows[0].experts_on_card[8] >= rows[1].experts_on_card[8] >= (rows[2].experts_on_card[8] or 0)


def test_version_for_machines(capsys):
    assert main(["version", "--json"]) == 0
    versions = json.loads(capsys.readouterr().out)
    assert set(versions) == {"twofold", "python", "torch", "native", "platform"}
    assert versions["native"]
