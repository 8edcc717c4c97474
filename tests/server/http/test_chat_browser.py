"""The chat page in Chromium: in light, dark and at 390 px, without faults, and each thing a person does with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine
from live_server import serving
from twofold.api.config import ServerConfig
from twofold.api.errors import RequestError
from twofold.server.app import create_app

from scripts.headless_chromium import DevTools, browser, chromium, open_page
from tests.e2e.axe import serious_findings
from tests.e2e.waiting import wait_until

PROGRAM = chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium (Debian: apt-get install chromium)"),
]
LOOKS = {"light": (1360, False), "dark": (1360, True), "phone": (390, False)}
ANSWER = [
    "<think>",
    "why not",
    "</think>",
    "# Foxes\n\nA **clever** fox <img src=x onerror=boom()> ![far](http://far.example/x.png)\n\n",
    "```py\nprint('a long line that is wider than a telephone, so that the block has to scroll sideways')\n",
    "```\n\n| a | b |\n|--|--:|\n| 1 | 2 |\n\n",
    "- one\n- two\n\n[far](http://far.example/) [bad](javascript:boom())",
]


class Page:
    """The page of a fake engine, used as a person would."""

    def __init__(self, tools: DevTools, engine: FakeEngine, url: str) -> None:
        self.tools, self.engine, self.url = tools, engine, url

    def open(self, look: str = "light") -> None:
        width, dark = LOOKS[look]
        open_page(self.tools, self.url, width=width, dark=dark)
        self.wait("document.getElementById('state')?.childElementCount")

    def js(self, expression: str) -> Any:
        return self.tools.evaluate(expression)

    def wait(self, expression: str) -> None:
        wait_until(lambda: self.js(f"!!({expression})"), limit_s=10)

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str, named: str = "") -> None:
        """Click the last element of `selector` with this text, with a person's permission to copy."""
        found = (
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            f".filter(each => !{json.dumps(named)} || each.textContent === {json.dumps(named)}).at(-1)"
        )
        self.wait(found)
        self.tools.call("Runtime.evaluate", expression=f"{found}.click()", userGesture=True)

    def type(self, text: str, *, enter: bool = True) -> None:
        self.js("document.getElementById('prompt').focus()")
        self.tools.call("Input.insertText", text=text)
        if enter:
            key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
            self.tools.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
            self.tools.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def say(self, text: str) -> None:
        """Type a message and wait for its whole answer."""
        self.type(text)
        self.wait_for_answer()

    def wait_for_answer(self) -> None:
        self.wait("!document.body.classList.contains('running')")

    @property
    def sent(self) -> list[tuple[str, str]]:
        """Roles and texts of the last conversation that reached the model."""
        return [(each["role"], each["content"]) for each in self.engine.tokenizer.rendered[0]]


@pytest.fixture(scope="module")
def tools() -> Iterator[DevTools]:
    assert PROGRAM is not None
    with browser(PROGRAM) as opened:
        yield opened


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine(max_context=4096)
    with serving(create_app(engine, ServerConfig(reasoning_parser="qwen3"))) as url:
        yield engine, url
    engine.close()


@pytest.fixture
def page(tools: DevTools, served: tuple[FakeEngine, str]) -> Iterator[Page]:
    engine, url = served
    engine.says, engine.fail_on_submit = None, None
    opened = Page(tools, engine, url)
    opened.open()
    opened.js("localStorage.clear(); sessionStorage.clear()")
    opened.open()
    yield opened
    engine.hold.set()
    engine.idle.wait(20)


@pytest.mark.parametrize("look", LOOKS)
def test_the_page_is_whole(page: Page, look: str) -> None:
    page.engine.says = ANSWER
    page.open(look)
    assert "Ask anything" in page.text(".welcome")
    page.say("tell me of foxes")
    wide = page.js("document.documentElement.scrollWidth <= innerWidth")
    assert wide, "nothing is cut off"
    assert page.js("document.querySelector('header').offsetHeight") < 64, "one row"
    assert page.text("article.user .plain") == "tell me of foxes"
    assert page.text(".md h1") == "Foxes"
    assert page.text(".md strong") == "clever"
    assert "<img src=x" in page.text(".md p"), "HTML stays text"
    assert page.js("document.querySelectorAll('.md img, .md script').length") == 0
    assert page.js("[...document.querySelectorAll('.md a')].map(each => each.protocol)") == ["http:"] * 2
    assert page.js("document.querySelector('article details').open") is False, "thinking is folded"
    assert page.js("document.querySelector('article details').textContent") == "Thinkingwhy not"
    dark = page.js("getComputedStyle(document.body).backgroundColor")
    assert dark == ("rgb(22, 25, 29)" if look == "dark" else "rgb(251, 251, 249)")
    for opener in ("#options", "#chats"):
        page.click(opener)
    tops = page.js(
        "['temperature', 'top_p'].map(id => document.getElementById(id).getBoundingClientRect().top)"
    )
    assert tops[0] == tops[1], "fields of a row stand in a row"
    assert serious_findings(page.tools) == []
    assert page.tools.seen.errors == []
    assert {each.split("/")[2] for each in page.tools.seen.requested if "://" in each} == {
        page.url.removeprefix("http://")
    }


def test_a_new_chat_does_not_get_the_answer_of_the_old_one(page: Page) -> None:
    page.engine.hold.clear()
    page.type("one two three")
    page.wait("document.querySelector('.md')")
    page.click("#new")
    page.wait_for_answer()
    page.engine.hold.set()
    page.say("four five")
    assert page.sent == [("user", "four five")]
    page.click("#chats")
    page.click("#side .title", "one two three")
    page.wait("document.querySelectorAll('article').length === 2")
    assert page.text("article.user .plain") == "one two three", "with the part that was answered"


def test_a_refused_message_returns_to_the_prompt_and_leaves_the_conversation(page: Page) -> None:
    page.say("one two")
    page.engine.fail_on_submit = RequestError("too long by far")
    page.type("a very long text")
    page.wait("document.querySelector('article.error')")
    assert page.text("article.error") == "too long by far"
    assert page.js("document.getElementById('prompt').value") == "a very long text"
    page.engine.fail_on_submit = None
    page.js("document.getElementById('prompt').value = ''")
    page.say("three")
    assert page.sent == [("user", "one two"), ("assistant", "one two "), ("user", "three")]


def test_typed_text_stays_while_an_answer_streams_and_when_the_page_loads_again(page: Page) -> None:
    page.engine.hold.clear()
    page.type("one two three")
    page.wait("document.querySelector('.md')")
    page.type("the next question")
    assert page.js("document.body.classList.contains('running')"), "Enter does not stop it"
    assert page.js("document.getElementById('prompt').value") == "the next question"
    page.tools.call("Page.reload")
    page.wait("document.getElementById('state')?.childElementCount && !document.body.className")
    assert page.js("document.getElementById('prompt').value") == "the next question"


def test_the_reader_may_scroll_while_an_answer_streams(page: Page) -> None:
    page.engine.says = ["line\n\n" * 60, "more\n\n" * 20, "end"]
    page.engine.hold.clear()
    page.type("one")
    page.wait("document.getElementById('log').scrollTop > 0")
    page.js("document.getElementById('log').scrollTop = 0")
    page.engine.hold.set()
    page.wait_for_answer()
    assert page.js("document.getElementById('log').scrollTop") == 0
    page.js("document.getElementById('log').scrollTop = 1e6")
    page.engine.says = ["line\n\n" * 60]
    page.say("two")
    page.js("1")
    assert (
        page.js("(l => l.scrollHeight - l.scrollTop - l.clientHeight)(document.getElementById('log'))") < 48
    )


def test_stop_ends_the_answer_and_keeps_its_part(page: Page) -> None:
    page.engine.hold.clear()
    page.type("one two three")
    page.wait("document.querySelector('.md')")
    page.click("#send", "Stop")
    page.wait_for_answer()
    assert "stopped" in page.text("article.assistant footer")
    wait_until(lambda: bool(page.engine.cancelled), limit_s=20)
    page.engine.hold.set()
    page.say("four")
    assert [text for _, text in page.sent] == ["one two three", "one", "four"]


def test_conversations_are_kept_edited_and_answered_again(page: Page) -> None:
    page.say("one two")
    page.say("three four")
    page.open()
    assert page.text(".welcome")
    page.click("#chats")
    page.click("#side .title", "one two")
    page.wait("document.querySelectorAll('.md').length === 2")
    page.click("article.assistant button", "Regenerate")
    page.wait_for_answer()
    assert [text for _, text in page.sent] == ["one two", "one two ", "three four"]
    page.js(
        "[...document.querySelectorAll('article.user button')].find(b => b.textContent === 'Edit').click()"
    )
    page.js("document.querySelector('article.user textarea').value = 'five'")
    page.click("article.user button", "Send again")
    page.wait_for_answer()
    assert page.sent == [("user", "five")]
    page.click("#chats")
    page.click("#side button", "Delete")
    page.wait("document.querySelector('.welcome')")
    assert page.js("Object.keys(localStorage).filter(key => key.includes('chat/')).length") == 0


def test_copy_works_without_the_clipboard_api(page: Page) -> None:
    page.js("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.js("document.addEventListener('copy', () => { window.copied = document.activeElement.value; })")
    page.engine.says = ["```py\nprint(1)\n```\n"]
    page.say("one")
    for selector, text in ((".code button", "print(1)\n"), ("article.assistant footer button", ANSWER_CODE)):
        page.click(selector, "Copy")
        page.wait("window.copied !== undefined")
        assert page.js("window.copied") == text
        page.js("delete window.copied")


ANSWER_CODE = "```py\nprint(1)\n```\n"


def test_system_prompt_and_sampling_are_sent_and_kept(page: Page) -> None:
    page.click("#options")
    page.js(
        "for (const [id, value] of Object.entries({ system: 'be brief', temperature: 0.5, top_k: 7 })) {"
        "document.getElementById(id).value = value;"
        "document.getElementById(id).dispatchEvent(new Event('change', { bubbles: true })); }"
    )
    page.open()
    page.say("one two")
    assert page.sent == [("system", "be brief"), ("user", "one two")]
    sampling = page.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k) == (0.5, 7)


def test_models_and_adapters_are_listed_and_the_footer_shows_the_accelerator(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    fairy = SimpleNamespace(name="fairy", path="/adapters/fairy")
    monkeypatch.setattr(page.engine.adapters, "known", lambda: [fairy], raising=False)
    page.open()
    shown = page.js("[...document.getElementById('model').options].map(each => each.text)")
    assert shown == ["fake-tales", "fairy (adapter of fake-tales)"]
    assert "emulated" in page.text("#state")
    assert "--accelerator none" in page.js("document.querySelector('#state details').textContent")
    assert "--telemetry-url" in page.text("#state"), "how to get a dashboard"


def test_the_footer_names_the_dashboard_and_its_command(page: Page) -> None:
    about = {"dashboard": "http://127.0.0.1:8501", "dashboard_command": "twofold dashboard --telemetry-url x"}
    stub(page, "chat/about", lambda: json.dumps(about))
    page.js(
        "const key = document.getElementById('key'); key.value = ''; key.dispatchEvent(new Event('change')); 1"
    )
    page.wait("document.querySelector('#state a')")
    assert page.js("document.querySelector('#state a').href") == "http://127.0.0.1:8501/"
    assert "start the dashboard" in page.text("#state"), "also without a pointer that shows tooltips"
    texts = page.js("[...document.querySelectorAll('#state details div')].map(each => each.textContent)")
    assert "twofold dashboard --telemetry-url x" in texts


def stub(page: Page, path: str, answer: Callable[[], str]) -> None:
    """Let the page get this text from a path."""
    page.js(
        f"window.fetch = ((before) => (path, options) => path.startsWith({json.dumps(path)})"
        f" ? Promise.resolve(new Response({json.dumps(answer())})) : before(path, options))(window.fetch)"
    )


def test_tokens_are_coloured_inside_the_rendered_text(page: Page) -> None:
    places = [
        {"hit": 2, "cpu": 0, "fetched": 0, "step_us": 1000.0},
        {"hit": 0, "cpu": 1, "fetched": 1, "step_us": 9e3},
    ]
    placed = {"accelerator": "emulated:x", "emulated": True, "tokens": places * 2}
    stub(page, "chat/placement", lambda: json.dumps(placed))
    page.js("document.getElementById('colours').checked = true")
    page.say("**one two** three four")
    page.wait("document.querySelector('.token')")
    assert page.text(".md strong") == "one two"
    tokens = page.js(
        "[...document.querySelectorAll('.token')]"
        ".map(each => [each.textContent, each.style.getPropertyValue('--share')])"
    )
    assert tokens == [["one ", "0.00"], ["two", "0.85"], [" ", "0.85"], ["three ", "0.00"], ["four", "0.85"]]
    assert "(emulated)" in page.js("document.querySelector('.token').title")


def test_tool_calls_are_folded(page: Page) -> None:
    def events() -> str:
        call = {"index": 0, "id": "c1", "function": {"name": "look", "arguments": '{"at": 1}'}}
        delta = {"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]}
        return f"data: {json.dumps(delta)}\n\ndata: [DONE]\n\n"

    stub(page, "v1/chat/completions", events)
    page.say("one")
    assert page.text("article.assistant summary") == "Tool call: look"
    assert (
        page.js("document.querySelector('article.assistant details .plain').textContent") == 'look({"at": 1})'
    )


PASTE = """(() => {
  const held = new DataTransfer();
  held.items.add(new File([Uint8Array.from(atob(%s), (each) => each.charCodeAt(0))], "a.png", { type: "image/png" }));
  const event = new %s{ bubbles: true, cancelable: true, %s: held });
  document.getElementById("prompt").dispatchEvent(event);
})()"""
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.mark.parametrize(
    ("event", "member"),
    [("ClipboardEvent('paste', ", "clipboardData"), ("DragEvent('drop', ", "dataTransfer")],
)
def test_a_picture_is_shown_sent_and_given_back(page: Page, event: str, member: str) -> None:
    """The fake model reads text only: the refusal says so, and the picture waits for the next try."""
    page.js(PASTE % (json.dumps(DOT), event, member))
    page.wait("document.querySelectorAll('#shown img').length === 1")
    page.type("what is it?")
    page.wait("document.querySelector('article.error')")
    assert "has no picture encoder" in page.text("article.error")
    assert page.js("document.getElementById('prompt').value") == "what is it?"
    page.wait("document.querySelectorAll('#shown img').length === 1")
    assert serious_findings(page.tools) == []
    page.click("#shown button")
    page.wait("document.getElementById('shown').hidden")
    page.click("#send")
    page.wait_for_answer()
    assert page.sent[-1] == ("user", "what is it?"), "without the picture it is answered"


def test_large_pictures_are_not_kept_in_the_browser(page: Page) -> None:
    url = f"data:image/png;base64,{DOT}"
    page.js(
        "import('/chat_store.js').then(({ fresh, save }) => { const made = fresh(); made.messages = ["
        f"{{ role: 'user', content: 'small', pictures: ['{url}'] }},"
        f"{{ role: 'user', content: 'large', pictures: ['{url}' + 'A'.repeat(2_000_000)] }}]; save(made); }})"
    )
    page.wait("Object.keys(localStorage).some(key => key.startsWith('twofold/chat/'))")
    page.open()
    page.click("#chats")
    page.click("#side .title")
    page.wait("document.querySelectorAll('article.user').length === 2")
    assert page.js("document.querySelectorAll('article.user img').length") == 1
    assert page.text("article.user .note") == "1 large picture is no longer in this browser."
