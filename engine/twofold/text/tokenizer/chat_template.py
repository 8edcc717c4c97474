"""Chat messages → prompt text, by the model's own Jinja template, rendered as by transformers.

Templates come with the model and messages from clients, so rendering runs in a sandbox with a budget
(`template_sandbox.py`). Reference: transformers `utils/chat_template_utils.py` (`_compile_jinja_template`,
`render_jinja_template`).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from twofold.api.errors import ModelLoadError, RequestError, TemplateLimitExceededError
from twofold.text.tokenizer.bounded_file import read_bounded_text
from twofold.text.tokenizer.shapes import Kind, RenderOutcome, shown
from twofold.text.tokenizer.template_budget import Budget, TemplateLimitError, steps_of
from twofold.text.tokenizer.template_sandbox import BUDGET, BoundedEnvironment
from twofold.text.tokenizer.tool_form import ToolForm, find_tool_form
from twofold.weights.json_file import read_json_object

TEMPLATE_FILE: Final = "chat_template.jinja"
TEMPLATE_FOLDER: Final = "additional_chat_templates"
_PROCESSOR_FILES: Final = ("chat_template.json", "processor_config.json")
"""Files of multimodal models' processors that may have the only template."""
MAX_TEMPLATE_BYTES: Final = 256 * 1024
MAX_RENDERED_CHARS: Final = 16 * 1024 * 1024
"""Longer than any context."""
_PROBE_STEPS: Final = 1_000_000
"""Steps for a conversation of a few short messages, a hundred times what published templates take."""
_MAX_REASON_CHARS: Final = 2000
_MAX_FORM_CHARS: Final = 200
"""Characters of a form of dates."""
_CONTINUE_HERE: Final = "\ue000continue here\ue001"
"""Placeholder after the message to be continued, of private-use characters that no text contains."""
ANSWER_MARKS: Final = ("\ue002", "\ue003")
"""Begin and end of an answer in text rendered with `marks_answers`."""


class ChatTemplate:
    """One compiled template. Safe to use from several threads."""

    def __init__(
        self,
        source: str,
        *,
        where: str,
        special_tokens: Mapping[str, str],
        tool_source: str | None = None,
        max_rendered_chars: int = MAX_RENDERED_CHARS,
        marks_answers: bool = False,
    ) -> None:
        """Compile `source` (for requests with tools, `tool_source` if given).

        With `marks_answers` the text of each {% generation %} block lies between `ANSWER_MARKS`.

        Raises ModelLoadError for a template that is not valid, or exceeds its limits on a single message.
        """
        self.declared: str | list[dict[str, str]] = source
        """The template in tokenizer_config.json's form."""
        if tool_source is not None:
            both = (("default", source), ("tool_use", tool_source))
            self.declared = [{"name": name, "template": template} for name, template in both]
        self.source = source if tool_source is None else f"{source}\n{tool_source}"
        """The source, including the one for tools."""
        self._special_tokens = dict(special_tokens)
        self._max_rendered_chars = max_rendered_chars
        self._shown: dict[tuple[Kind, ...], RenderOutcome] = {}
        environment = _environment(marks_answers)
        self._template = _compile(environment, source, where)
        self._tool_template = (
            self._template if tool_source is None else _compile(environment, tool_source, where)
        )
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        if tool_source is not None:
            self.variables |= {"tools"}
        """Names that the template reads, e.g. "enable_thinking"; some of them only on some branches."""
        self._check_limits(where)

    @classmethod
    def find(
        cls,
        directory: Path,
        tokenizer_config: Mapping[str, Any],
        special_tokens: Mapping[str, str],
        *,
        marks_answers: bool = False,
    ) -> ChatTemplate | None:
        """The template of a model directory: of the first of chat_template.jinja, tokenizer_config.json,
        chat_template.json and processor_config.json that has one; None without any.

        Raises ModelLoadError for a template that does not parse or a field of another form.
        """
        path = directory / TEMPLATE_FILE
        where = str(path)
        named = {"default": _read_template(path)} if path.exists() else {}
        for name in ("tokenizer_config.json", *_PROCESSOR_FILES):
            if named:
                break
            where = f"{directory / name}: chat_template"
            config = tokenizer_config if name == "tokenizer_config.json" else _read_config(directory / name)
            if config.get("chat_template") is not None:
                named = _named_templates(config["chat_template"], where)
        for further in sorted((directory / TEMPLATE_FOLDER).glob("*.jinja")):
            named[further.stem] = _read_template(further)
        if not named:
            return None
        if "default" not in named:
            raise ModelLoadError(
                f"{where} has templates {sorted(named)}, expected one named 'default'; add it"
            )
        return cls(
            named["default"],
            where=where,
            special_tokens=special_tokens,
            tool_source=named.get("tool_use"),
            marks_answers=marks_answers,
        )

    @classmethod
    def of_gguf(
        cls, fields: Mapping[str, Any], where: str, special_tokens: Mapping[str, str]
    ) -> ChatTemplate | None:
        """The template in a GGUF file's metadata, or None. Raises ModelLoadError as `find`."""
        sources: dict[str, str] = {}
        for key in ("tokenizer.chat_template", "tokenizer.chat_template.tool_use"):
            source = fields.get(key)
            if source is None:
                continue
            if not isinstance(source, str) or len(source) > MAX_TEMPLATE_BYTES:
                raise ModelLoadError(
                    f"{where}: {key} is not text of at most {MAX_TEMPLATE_BYTES} bytes; give the tokenizer of the "
                    "original model with --tokenizer DIR"
                )
            sources[key] = source
        default = sources.get("tokenizer.chat_template")
        if default is None:
            return None
        return cls(
            default,
            where=f"{where}: tokenizer.chat_template",
            special_tokens=special_tokens,
            tool_source=sources.get("tokenizer.chat_template.tool_use"),
        )

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """The form of tool calls that it expects; None: it shows neither tools nor calls."""
        return find_tool_form(self._probe)

    @cached_property
    def after_answer(self) -> str:
        """What it writes after an answer's text; "" if it refuses a short conversation."""
        answer = "probed answer"
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        for messages in (turns, [*turns, turns[0]]):
            try:
                prompt = self._probe(messages, add_generation_prompt=False)
            except RequestError:
                continue
            after = prompt.rpartition(answer)[2]
            if after.strip():
                return after
        return ""

    def shows(self, shape: tuple[Kind, ...]) -> RenderOutcome:
        """How it renders a conversation of messages of these kinds. Rendered once for each shape."""
        if shape not in self._shown:
            self._shown[shape] = shown(self._probe, shape, self.tool_form)
        return self._shown[shape]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        max_steps: int | None = None,
    ) -> str:
        """The prompt. With `continue_final_message` it ends with the last message's content, unchanged.

        Raises RequestError when the template refuses the messages, does not show the one to be continued, or exceeds a
        limit: `max_steps` (default: `steps_of` the messages), or the length of its output.
        """
        template = self._tool_template if tools else self._template
        turns = list(messages)
        if continue_final_message:
            turns[-1] = {**turns[-1], "content": f"{turns[-1]['content'] or ''}{_CONTINUE_HERE}"}
        context = {
            **self._special_tokens,
            **(variables or {}),
            "messages": turns,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            BUDGET: Budget(steps_of(len(turns)) if max_steps is None else max_steps),
        }
        prompt = self._generate(template, context)
        if not continue_final_message:
            return prompt
        end = prompt.rfind(_CONTINUE_HERE)
        if end < 0:
            raise RequestError(
                "the chat template does not show the last message's content, so it cannot be continued; leave "
                "continue_final_message out",
                param="continue_final_message",
            )
        return prompt[:end]

    def _probe(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """`render` for a conversation of a few short messages."""
        return self.render(
            messages, tools, add_generation_prompt=add_generation_prompt, max_steps=_PROBE_STEPS
        )

    def _check_limits(self, where: str) -> None:
        """ModelLoadError if a single message exceeds a limit. A template may refuse it for any other reason."""
        tools = [{"type": "function", "function": {"name": "look_up", "description": "", "parameters": {}}}]
        for offered in [None] if self._tool_template is self._template else [None, tools]:
            try:
                self._probe([{"role": "user", "content": "?"}], offered)
            except TemplateLimitExceededError as error:
                raise ModelLoadError(
                    f"{where}: the chat template exceeds a limit on a conversation of one message: {error.limit}; "
                    "fix it, or download it again"
                ) from None
            except RequestError:
                continue

    def _generate(self, template: jinja2.Template, context: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in template.generate(context):
                num_chars += len(piece)
                if num_chars > self._max_rendered_chars:
                    raise TemplateLimitError(f"its output exceeds {self._max_rendered_chars} characters")
                pieces.append(piece)
        except TemplateLimitError as error:
            raise TemplateLimitExceededError(str(error)) from None
        except (RecursionError, MemoryError):
            raise RequestError(
                "the chat template exhausted its limits on these messages", param="messages"
            ) from None
        except Exception as error:  # a template may fail in any way Python can; the input is always the cause
            reason = " ".join(str(error)[:_MAX_REASON_CHARS].split())[:300] or type(error).__name__
            raise RequestError(
                f"the chat template refused the messages: {reason}; check roles, their order and the content's form",
                param="messages",
                # The template's own words are no text of the messages.
                private="" if reason in self.source else f": {reason}",
            ) from None
        return "".join(pieces)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's interface)
    marks = False

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        if not self.marks:
            return body
        begin, end = (
            jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)], lineno=line) for mark in ANSWER_MARKS
        )
        return [begin, *body, end]


class _MarkingGenerationTag(_GenerationTag):
    """The same, with `ANSWER_MARKS` around the body."""

    marks = True


def _environment(marks_answers: bool) -> jinja2.Environment:
    tag = _MarkingGenerationTag if marks_answers else _GenerationTag
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[tag, jinja2.ext.loopcontrols]
    )
    environment.bound_filters({"tojson": _tojson})
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _compile(environment: jinja2.Environment, source: str, where: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_BYTES:
        raise ModelLoadError(
            f"{where}: a chat template of {len(source)} characters, expected at most {MAX_TEMPLATE_BYTES}; download it "
            "again"
        )
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        problem = f"line {error.lineno}: {error.message}"
    except TemplateLimitError as error:
        problem = f"or a hostile one: {error}"
    except (RecursionError, MemoryError):
        problem = "nested too deep"
    except Exception as error:  # the compiler of Python refuses some that Jinja accepts: 21 nested loops
        problem = " ".join(str(error)[:_MAX_REASON_CHARS].split())[:300] or type(error).__name__
    raise ModelLoadError(f"{where}: not a valid Jinja template, {problem}; fix or download it again")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter would escape HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_FORM_CHARS:
        raise jinja2.TemplateError(f"a form of dates has at most {_MAX_FORM_CHARS} characters")
    return datetime.datetime.now().strftime(form)


def _read_template(path: Path) -> str:
    return read_bounded_text(path, MAX_TEMPLATE_BYTES)


def _read_config(path: Path) -> Mapping[str, Any]:
    return read_json_object(path, "the processor's settings") if path.exists() else {}


def _named_templates(declared: Any, where: str) -> dict[str, str]:
    """A single template, or the list form [{"name": …, "template": …}, …]."""
    if isinstance(declared, str):
        return {"default": declared}
    named: dict[str, str] = {}
    for item in declared if isinstance(declared, list) else [declared]:
        name, template = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelLoadError(
                f"{where} is a {type(declared).__name__}, expected a string or a list of name and template; fix it"
            )
        named[name] = template
    return named
