"""`twofold launch` with agents that are scripts: each calls the server in its agent's protocol, as configured, and
prints the configuration."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from twofold.api.config import ServerConfig
from twofold.server.app import create_app
from twofold.tools.cli import main as cli
from twofold.tools.cli.launch.agents import AGENTS, Provider

from tests.tiny_models.writing import CHATML_TEMPLATE, write_tiny_model, write_tiny_tokenizer

FAKE_AGENT = f"""#!{sys.executable}
import json, os, signal, sys, urllib.request
name, arguments, env = os.path.basename(sys.argv[0]), sys.argv[1:], os.environ
said = {{"role": "user", "content": "once upon a time"}}
path, body = "/chat/completions", {{"messages": [said], "max_tokens": 8, "stream": True}}
if name == "claude":
    url, key, model = env["ANTHROPIC_BASE_URL"] + "/v1", env["ANTHROPIC_AUTH_TOKEN"], env["ANTHROPIC_MODEL"]
    path = "/messages?beta=true"
    body["system"] = [{{"type": "text", "text": "be brief", "cache_control": {{"type": "ephemeral"}}}}]
    body["tools"] = [{{"name": "Read", "input_schema": {{"type": "object"}}}}]
elif name == "codex":
    told = dict(pair.split("=", 1) for pair in arguments[1 : 2 * arguments.count("-c") : 2])
    url, model = json.loads(told["model_providers.twofold.base_url"]), json.loads(told["model"])
    key = env[json.loads(told["model_providers.twofold.env_key"])]
    path = {{"responses": "/responses", "chat": path}}[json.loads(told["model_providers.twofold.wire_api"])]
    tools = [{{"type": "function", "name": "shell", "strict": False, "parameters": {{"type": "object"}}}}]
    body = {{"instructions": "be brief", "input": [{{"type": "message", **said}}], "tools": tools, "stream": True}}
    body |= {{"tool_choice": "auto", "store": False, "include": [], "max_output_tokens": 8}}
elif name == "opencode":
    config = json.load(open(env["OPENCODE_CONFIG"]))
    model = config["model"].removeprefix("twofold/")
    options = config["provider"]["twofold"]["options"]
    url, key = options["baseURL"], env[options["apiKey"][5:-1]]
elif name == "cline":
    folder = arguments[arguments.index("--data-dir") + 1] + "/settings/"
    provider = json.load(open(folder + "providers.json"))["providers"]["openai-compatible"]["settings"]
    url, key, model = provider["baseUrl"], env["OPENAI_API_KEY"], provider["model"]
    assert json.load(open(folder + "models.json"))["providers"]["openai-compatible"]["models"][model]["contextWindow"]
elif name == "cn":
    (config,) = json.load(open(arguments[arguments.index("--config") + 1]))["models"]
    url, model, key = config["apiBase"], config["model"], env[config["apiKey"].split()[1].removeprefix("secrets.")]
elif name == "aider":
    url, key, model = env["OPENAI_API_BASE"], env["OPENAI_API_KEY"], env["AIDER_MODEL"].removeprefix("openai/")
    assert json.load(open(env["AIDER_MODEL_METADATA_FILE"]))[env["AIDER_MODEL"]]["max_input_tokens"]
elif name == "crush":
    config = json.load(open(env["CRUSH_GLOBAL_CONFIG"] + "/crush.json"))
    provider = config["providers"][config["models"]["large"]["provider"]]
    url, key, model = provider["base_url"], env[provider["api_key"][1:]], config["models"]["large"]["model"]
else:
    assert json.load(open(env["QWEN_CODE_SYSTEM_DEFAULTS_PATH"]))["model"]["generationConfig"]["contextWindowSize"]
    url, key, model = env["OPENAI_BASE_URL"], env["OPENAI_API_KEY"], env["OPENAI_MODEL"]
headers = {{"Authorization": "Bearer " + key, "Content-Type": "application/json"}}
if path.startswith("/messages"):
    headers |= {{"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}}
data = json.dumps(body | {{"model": model}}).encode()
opener = urllib.request.build_opener(urllib.request.ProxyHandler({{}}))
asked = urllib.request.Request(url + path, data, headers)
text = ""
for line in opener.open(asked, timeout=60):
    if line.startswith(b"data: {{"):
        event = json.loads(line[6:])
        if path == "/responses":
            text += event["delta"] if event["type"] == "response.output_text.delta" else ""
        elif path == "/chat/completions":
            text += event["choices"][0]["delta"].get("content") or "" if event["choices"] else ""
        elif event["type"] == "content_block_delta":
            text += event["delta"]["text"]
told = {{"text": text, "path": path, "arguments": arguments, "key": key, "model": model, "proxy": env["NO_PROXY"]}}
told["leaks"] = [name for name in ("ANTHROPIC_API_KEY", "http_proxy") if name in env]
print(json.dumps(told), flush=True)
if arguments[-1:] == ["--wait"]:
    signal.pause()
sys.exit(7)
"""


FILES = {
    "opencode": ["config.json"],
    "qwen": ["system-defaults.json"],
    "cline": ["settings/models.json", "settings/providers.json"],
    "continue": ["config.yaml"],
    "aider": ["model-metadata.json"],
    "crush": ["crush.json"],
}


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    """A folder for PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for agent in AGENTS.values():
        (folder / agent.executable).write_text(FAKE_AGENT)
        (folder / agent.executable).chmod(0o755)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    (folder / ".codex").mkdir(parents=True)
    (folder / ".codex" / "config.toml").write_text("model = 'mine'\n")
    return folder


@pytest.fixture
def server() -> Iterator[str]:
    engine = FakeEngine()
    with serving(create_app(engine, ServerConfig(api_key=("sesame",), tool_call_parser="hermes"))) as url:
        yield url
    engine.close()


def launch(*arguments: str, home: Path, agents: Path, key: str = "") -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TWOFOLD_")}
    environment |= {
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "PATH": str(agents),
        "ANTHROPIC_API_KEY": "another provider's",
        # A proxy that would break everything that is sent through it.
        "http_proxy": "http://127.0.0.1:1",
    }
    if key:
        environment["TWOFOLD_API_KEY"] = key
    command = [sys.executable, "-m", "twofold.tools.cli", "launch", *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def files_of(home: Path) -> dict[str, str]:
    return {str(path.relative_to(home)): path.read_text() for path in home.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_asks_the_server_that_runs(name, server, agents, home, monkeypatch):
    before = files_of(home)
    process = launch(
        name, "--base-url", server, "--", "-p", "--dry-run", home=home, agents=agents, key="sesame"
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 7, err
    reported = json.loads(out)
    text = "be brief once upon a time " if name in ("claude", "codex") else "once upon a time "
    assert (reported["text"], reported["key"], reported["model"]) == (text, "sesame", "fake-tales")
    assert reported["path"].startswith(AGENTS[name].needs.removeprefix("/v1"))
    assert reported["arguments"][-2:] == ["-p", "--dry-run"]
    assert "127.0.0.1" in reported["proxy"]
    left_out = {"claude": {"ANTHROPIC_API_KEY"}, "qwen": {"http_proxy"}}.get(name, set())
    assert set(reported["leaks"]) == {"ANTHROPIC_API_KEY", "http_proxy"} - left_out
    after = files_of(home)
    assert before.items() <= after.items()
    written = set(after) - set(before)
    assert written == {f"state/twofold/launch/{name}/{file}" for file in FILES.get(name, ())}
    assert "warning: fake-tales is served with a context of 64 tokens" in err
    assert "sesame" not in "".join(after[file] for file in written)
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    assert cli.main(["launch", name, "--restore"]) == 0
    assert files_of(home) == before


@pytest.fixture
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Environment for commands that end without an agent, in this process."""
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    monkeypatch.setenv("TWOFOLD_API_KEY", "sesame")
    monkeypatch.setenv("PATH", "/nowhere")
    return monkeypatch


TOOLS_TEMPLATE = """{% if tools %}<tool_call>{"name": …}</tool_call>{% endif %}""" + CHATML_TEMPLATE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that can call tools."""
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    write_tiny_tokenizer(path, chat_template=TOOLS_TEMPLATE)
    return str(path)


@pytest.mark.parametrize("name", AGENTS)
def test_a_plan_starts_and_writes_nothing_and_shows_no_key(name, server, model, home, here, capsys):
    for url, served in ((server, []), ("http://127.0.0.1:1", [model])):
        assert cli.main(["launch", name, *served, "--dry-run", "--base-url", url, "--", "-p"]) == 0
        out = capsys.readouterr().out
        assert "sesame" not in out
        assert "********" in out
        assert ("start: " in out) == (url != server)
        assert "not found on PATH" in out
    assert set(files_of(home)) == {".codex/config.toml"}


@pytest.mark.parametrize(
    ("arguments", "has_agent", "key", "words"),
    [
        (["claude"], False, "sesame", "not found on PATH"),
        (["claude"], True, "open", "requires a key; set TWOFOLD_API_KEY"),
        (["claude", "other"], True, "sesame", "serves 'fake-tales', not 'other'"),
        (["claude", "/nowhere/at-all", "--base-url", "http://127.0.0.1:1"], True, "", "no such model"),
    ],
)
def test_a_failed_launch_is_reported(arguments, has_agent, key, words, server, agents, here, capsys):
    here.setenv("TWOFOLD_API_KEY", key)
    if has_agent:
        here.setenv("PATH", str(agents))
    assert cli.main(["launch", "--base-url", server, *arguments]) in (1, 2)
    reported = capsys.readouterr().err
    assert words in reported


def test_a_running_server_whose_model_cannot_call_tools_is_refused(agents, here, home, capsys):
    here.setenv("PATH", str(agents))
    engine = FakeEngine()
    with serving(create_app(engine, ServerConfig(api_key=("sesame",)))) as url:
        assert cli.main(["launch", "claude", "--base-url", url]) == 2
    engine.close()
    reported = capsys.readouterr().err
    assert "'fake-tales'" in reported
    assert "cannot call tools" in reported
    assert "Qwen3" in reported
    assert set(files_of(home)) == {".codex/config.toml"}


@pytest.mark.parametrize(
    ("template", "flags", "words"),
    [
        (CHATML_TEMPLATE, [], "its chat template renders none"),
        ("{{ tools }}" + CHATML_TEMPLATE, [], "--tool-call-parser NAME"),
        (TOOLS_TEMPLATE, ["--server-args=--tool-call-parser none"], "--tool-call-parser NAME"),
        ("{{ tools }}" + CHATML_TEMPLATE, ["--server-args=--tool_call_parser hermes"], None),
    ],
)
def test_no_server_is_started_for_a_model_that_cannot_call_tools(
    template, flags, words, agents, here, tmp_path, capsys
):
    here.setenv("PATH", str(agents))
    here.setattr(
        "twofold.tools.cli.launch.command._own_server", lambda *_: pytest.fail("a server was started")
    )
    model = write_tiny_model(tmp_path / "tiny")
    write_tiny_tokenizer(model, chat_template=template)
    requested = ["launch", "claude", str(model), "--base-url", "http://127.0.0.1:1", *flags]
    assert cli.main([*requested, "--dry-run"]) == (0 if words is None else 2)
    if words is None:
        return
    assert cli.main(requested) == 2
    reported = capsys.readouterr().err.splitlines()
    assert len(reported) == 2
    assert all("'tiny' cannot call tools" in line and words in line for line in reported)


def test_the_bundled_model_launches_no_agent(agents, here, capsys):
    here.setenv("PATH", str(agents))
    assert cli.main(["launch", "claude", "--base-url", "http://127.0.0.1:1"]) == 2
    assert "'twofold-tales' cannot call tools" in capsys.readouterr().err


@pytest.mark.slow
def test_its_own_server_lives_as_long_as_the_agent(agents, home, model):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    flags = ("--base-url", url, "--server-args", "--accelerator none --cpu-threads 1")
    process = launch("qwen", str(model), *flags, "--", "--wait", home=home, agents=agents)
    assert process.stdout is not None
    reported: dict[str, Any] = json.loads(process.stdout.readline() or "{}")
    assert reported, process.communicate()[1]
    assert reported["model"] == "tiny"
    assert HTTP.get(f"{url}/ready").status_code == 200
    # The server has its own random key.
    assert HTTP.get(f"{url}/v1/models").status_code == 401
    process.send_signal(signal.SIGINT)  # the agent handles it
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(Exception, match="refused"):
        HTTP.get(f"{url}/ready")
    process.communicate()


def test_qwen_code_which_ignores_no_proxy_gets_no_proxy_for_a_local_server():
    proxies = {"HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"}
    for url in ("http://127.0.0.1:10002", "http://localhost:10002", "http://[::1]:10002"):
        assert set(AGENTS["qwen"].settings(Provider(url, "k", "m"), FOLDER).unset) == proxies
    assert AGENTS["qwen"].settings(Provider("https://models.example", "k", "m"), FOLDER).unset == ()
    assert proxies.isdisjoint(
        AGENTS["codex"].settings(Provider("http://localhost:1", "k", "m"), FOLDER).unset
    )


def test_limits_are_those_of_the_server():
    provider = Provider("http://h", "k", "a/b", 32_000)
    opencode = json.loads(AGENTS["opencode"].settings(provider, FOLDER).files["config.json"])
    assert opencode["provider"]["twofold"]["models"]["a/b"]["limit"] == {"context": 32_000, "output": 8000}
    # It does not count pings and times out after 300 s.
    claude = AGENTS["claude"].settings(provider, FOLDER)
    assert int(claude.environment["CLAUDE_STREAM_IDLE_TIMEOUT_MS"]) >= 3_600_000
    codex = AGENTS["codex"].settings(provider, FOLDER).arguments
    assert {"model_context_window=32000", "model_auto_compact_token_limit=24000"} <= set(codex)


@pytest.mark.parametrize(
    ("length", "begins_at"),
    [(32_768, 22_528), (65_536, 45_056), (131_072, 131_072 - 33_000), (1_000_000, 967_000)],
)
def test_claude_code_compacts_before_the_context_is_full(length, begins_at):
    """By the arithmetic of its version 2.1.332."""
    environment = AGENTS["claude"].settings(Provider("http://h", "k", "m", length), FOLDER).environment
    assumed = int(environment.get("CLAUDE_CODE_MAX_CONTEXT_TOKENS", 200_000))
    window = min(assumed, max(100_000, int(environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"])))
    room = int(environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"])
    left = window - min(room, 20_000)
    share = int(environment.get("CLAUDE_AUTOCOMPACT_PCT_OVERRIDE", 100))
    begins = min(left * share // 100, left - 13_000)
    assert begins_at - 1000 < begins <= begins_at
    assert begins + room <= length


def test_aider_needs_no_tool_calls(agents, here, home, capfd):
    here.setenv("PATH", str(agents))
    engine = FakeEngine()
    with serving(create_app(engine, ServerConfig(api_key=("sesame",)))) as url:
        assert cli.main(["launch", "aider", "--base-url", url, "--dry-run"]) == 0
    engine.close()
    assert "AIDER_MODEL=openai/fake-tales" in capfd.readouterr().out


FOLDER = Path("/state")
