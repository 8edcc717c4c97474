"""Dialects of tool calls and reasoning, by the names of vLLM's --tool-call-parser and --reasoning-parser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class ToolDialect:
    """How a model calls tools. The file `module` reads what follows a mark."""

    name: str
    module: str
    begins: tuple[str, ...]
    """Marks that begin calls, anywhere in the answer."""
    signs: tuple[str, ...]
    """Strings that the chat template of a model with this dialect contains, all of them."""
    tokens: tuple[str, ...] = ()
    """Further marks that may be special tokens, whose text an answer would leave out."""
    at_start: tuple[str, ...] = ()
    """Beginnings of a call without a mark, at the start of the answer."""
    marks_are_tokens: bool = False
    """`begins` are special tokens and never text: they also end the reasoning."""
    short_ids: bool = False
    """The template accepts only ids of nine letters and digits."""
    is_whole: bool = False
    """Its marks enclose the whole answer, including reasoning and text."""


@dataclass(frozen=True)
class ReasoningDialect:
    """How a model marks its reasoning."""

    name: str
    begins: tuple[str, ...]
    """Marks at the start of an answer, unless the prompt already has one."""
    ends: tuple[str, ...]
    signs: tuple[str, ...]
    """As in ToolDialect."""
    anywhere: bool = False
    """Reasoning may also begin after text."""
    dropped: tuple[str, ...] = ()
    """Marks around the text that follows; they are dropped."""
    between: str = ""
    """Marks between reasoning and what follows, for grammars."""
    lead: str = ""
    """Mark before the answer's text, for grammars."""
    is_whole: bool = False


_THINK: Final = (("<think>",), ("</think>",), ("</think>",))
_SEP: Final = "<｜tool▁sep｜>"
_CALLS, _CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
_CALLS_END, _CALL_END = "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>"
_DSML: Final = "<｜DSML｜function_calls>"
_DSML_TAGS: Final = ("</｜DSML｜function_calls>", "</｜DSML｜invoke>", "</｜DSML｜parameter>")
_DEEPSEEK: Final = (_SEP, _CALLS_END, _CALL_END)
_GLM: Final = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_SOLAR: Final = ("<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>", "<|calls|>")
_HARMONY: Final = ("<|channel|>", "<|message|>")
_HARMONY_TOKENS: Final = (*_HARMONY, "<|start|>", "<|end|>", "<|constrain|>", "<|return|>", "<|call|>")


def _hy_tool(name: str, suffix: str) -> ToolDialect:
    """Hy3's calls; the names of all tags end in `suffix`."""
    tags = ("tool_sep", "arg_key", "arg_value", "/tool_calls", "/tool_call", "/arg_key", "/arg_value")
    begins = (f"<tool_calls{suffix}>", f"<tool_call{suffix}>")
    return ToolDialect(name, "hy_v3", begins, ("tool_sep", suffix), tuple(f"<{tag}{suffix}>" for tag in tags))


_TOOLS: Final = (
    ToolDialect("hermes", "hermes", ("<tool_call>",), ("<tool_call>", '"name'), ("</tool_call>",)),
    ToolDialect(
        "qwen3_coder",
        "qwen3_coder",
        ("<tool_call>", "<function="),
        ("<function=", "<parameter="),
        ("</tool_call>",),
    ),
    ToolDialect(
        "seed_oss",
        "qwen3_coder",
        ("<seed:tool_call>",),
        ("<seed:tool_call>", "<function="),
        ("</seed:tool_call>",),
    ),
    ToolDialect("deepseek_v32", "minimax_m2", (_DSML,), ("｜DSML｜",), ("｜DSML｜", *_DSML_TAGS)),
    ToolDialect(
        "deepseek_v3", "deepseek", (_CALLS, _CALL), (_SEP, "```json"), _DEEPSEEK, marks_are_tokens=True
    ),
    ToolDialect("deepseek_v31", "deepseek", (_CALLS, _CALL), (_SEP,), _DEEPSEEK, marks_are_tokens=True),
    ToolDialect(
        "glm47",
        "glm",
        ("<tool_call>",),
        ("<tool_call>", "</arg_key><arg_value>"),
        _GLM,
    ),
    ToolDialect(
        "glm45",
        "glm",
        ("<tool_call>",),
        ("<tool_call>", "<arg_key>"),
        _GLM,
    ),
    _hy_tool("hy_v3", ":opensource"),
    _hy_tool("hy_v3_preview", ""),
    ToolDialect(
        "solar_open",
        "solar_open",
        ("<|tool_calls|>", "<|tool_call:begin|>"),
        ("<|tool_call:begin|>",),
        _SOLAR,
        marks_are_tokens=True,
    ),
    ToolDialect(
        "mistral",
        "mistral",
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]",),
        ("[ARGS]", "[CALL_ID]"),
        marks_are_tokens=True,
        short_ids=True,
    ),
    ToolDialect("openai", "harmony", (), _HARMONY, _HARMONY_TOKENS, is_whole=True),
    ToolDialect(
        "kimi_k2",
        "kimi_k2",
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        ("<|tool_call_argument_begin|>",),
        ("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
        marks_are_tokens=True,
    ),
    ToolDialect(
        "minimax_m2",
        "minimax_m2",
        ("<minimax:tool_call>",),
        ("<minimax:tool_call>", "<invoke name="),
        ("</minimax:tool_call>",),
    ),
    ToolDialect(
        "llama4_json",
        "llama4",
        ("<|python_start|>", "<|python_tag|>"),
        ('"parameters": ',),
        ("<|python_end|>",),
        at_start=("{",),
    ),
    ToolDialect(
        "llama4_pythonic",
        "pythonic",
        ("<|python_start|>",),
        ("[func_name1(",),
        ("<|python_end|>",),
        at_start=("[",),
    ),
    ToolDialect(
        "lfm2",
        "pythonic",
        ("<|tool_call_start|>",),
        ("List of tools: ",),
        ("<|tool_call_end|>",),
        marks_are_tokens=True,
    ),
    ToolDialect("granite", "granite", ("<|tool_call|>",), ("<|tool_call|>",), ()),
    ToolDialect("hunyuan_a13b", "granite", ("<tool_calls>",), ("<tool_calls>",), ("</tool_calls>",)),
    ToolDialect(
        "gemma4",
        "gemma4",
        ("<|tool_call>",),
        ("<|tool_call>call:",),
        ("<tool_call|>", '<|"|>'),
        marks_are_tokens=True,
    ),
)
_REASONING: Final = (
    ReasoningDialect("qwen3", *_THINK),
    ReasoningDialect("deepseek_r1", *_THINK),
    ReasoningDialect("glm45", *_THINK),
    ReasoningDialect("kimi_k2", *_THINK),
    ReasoningDialect("minimax_m2", *_THINK),
    ReasoningDialect("seed_oss", ("<seed:think>",), ("</seed:think>",), ("</seed:think>",)),
    ReasoningDialect("ernie45", *_THINK, dropped=("<response>", "</response>")),
    ReasoningDialect(
        "hunyuan_a13b",
        ("<think>",),
        ("</think>",),
        ("</think>", "<answer>"),
        dropped=("<answer>", "</answer>"),
    ),
    ReasoningDialect("hy_v3", ("<think:opensource>",), ("</think:opensource>",), ("think", ":opensource")),
    ReasoningDialect("hy_v3_preview", *_THINK),
    ReasoningDialect(
        "solar_open",
        ("<|think|>",),
        ("<|end|>",),
        ("<|think|>", "<|content|>"),
        dropped=("<|begin|>assistant", "<|content|>", "<|end|>"),
        between="<|begin|>assistant",
        lead="<|content|>",
    ),
    ReasoningDialect("mistral", ("[THINK]",), ("[/THINK]",), ("[THINK]",)),
    ReasoningDialect(
        "granite",
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        ("Here is my thought process:",),
    ),
    ReasoningDialect(
        "gemma4", ("<|channel>thought\n",), ("<channel|>",), ("<|channel>thought",), anywhere=True
    ),
    ReasoningDialect("openai_gptoss", (), (), _HARMONY, is_whole=True),
)
_REASONING_TOKENS: Final = (
    "<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<seed:think>", "</seed:think>",
    "<think:opensource>", "</think:opensource>", "<|think|>", "<|content|>", "<|begin|>", "<|end|>",
)  # fmt: skip

TOOL_PARSERS: Final = {dialect.name: dialect for dialect in _TOOLS}
REASONING_PARSERS: Final = {dialect.name: dialect for dialect in _REASONING}
# Further names of vLLM's parsers: of several dialects, the one that the template shows, else the first.
TOOL_ALIASES: Final = {
    "hy_v3": ("hy_v3", "hy_v3_preview"), "poolside_v1": ("glm47", "glm45"), "qwen3_xml": ("qwen3_coder",),
    "step3p5": ("qwen3_coder",), "mimo": ("qwen3_coder",), "llama3_json": ("llama4_json",),
}  # fmt: skip
REASONING_ALIASES: Final = {
    "hy_v3": ("hy_v3", "hy_v3_preview"), "poolside_v1": ("deepseek_r1",), "step3p5": ("deepseek_r1",),
    "mimo": ("qwen3",), "deepseek_v3": ("deepseek_r1",),
}  # fmt: skip


def encloses_answer(tool_parser: str | None, reasoning_parser: str | None) -> bool:
    """Whether the marks of one of these parsers enclose the whole answer, including text."""
    tool, reasoning = TOOL_PARSERS.get(tool_parser or ""), REASONING_PARSERS.get(reasoning_parser or "")
    return any(dialect is not None and dialect.is_whole for dialect in (tool, reasoning))


def tokens_of(tool_parser: str | None, reasoning_parser: str | None) -> tuple[str, ...]:
    """Marks that the parsers need although they may be special tokens of the vocabulary."""
    tokens: list[str] = []
    if tool_parser is not None:
        dialect = TOOL_PARSERS[tool_parser]
        tokens += (*dialect.begins, *dialect.tokens)
    if reasoning_parser is not None:
        tokens += _HARMONY_TOKENS if REASONING_PARSERS[reasoning_parser].is_whole else _REASONING_TOKENS
    return tuple(dict.fromkeys(tokens))
