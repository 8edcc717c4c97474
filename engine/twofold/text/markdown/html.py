"""Markdown as HTML for the chat page: no raw HTML, no styles, no address that a browser would fetch by itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.renderer import RendererHTML, RendererProtocol
from markdown_it.token import Token

from twofold.text.markdown.parsing import blocks, parser


class HtmlBlock(NamedTuple):
    """A top-level block."""

    line: int
    """Its first line in the text, from 0."""
    html: str


def html_blocks(text: str) -> list[HtmlBlock]:
    """The top-level blocks of `text`; `blocks` says which of them stay while the text grows."""
    env: dict[str, Any] = {}
    options = parser().options
    return [HtmlBlock(line, _renderer().render(tokens, options, env)) for line, tokens in blocks(text, env)]


@cache
def _renderer() -> RendererProtocol:
    md = MarkdownIt("commonmark")
    for rule in (_fence, _code_block, _image, _link_open, _table_open, _table_close, _cell_open):
        name = rule.__name__.removeprefix("_")
        for rule_name in ("th_open", "td_open") if rule is _cell_open else (name,):
            md.add_render_rule(rule_name, rule)
    return md.renderer


def _fence(self: RendererHTML, tokens: Sequence[Token], at: int, *_: Any) -> str:
    language = tokens[at].info.split()[:1]
    return _code(tokens[at].content, language[0] if language else "")


def _code_block(self: RendererHTML, tokens: Sequence[Token], at: int, *_: Any) -> str:
    return _code(tokens[at].content, "")


def _code(text: str, language: str) -> str:
    # The page handles the button. Whatever may scroll must take the keyboard's focus.
    return (
        f'<div class="code"><div class="bar"><span>{escapeHtml(language or "text")}</span>'
        '<button type="button" class="copy">Copy</button></div>'
        f'<pre tabindex="0"><code>{escapeHtml(text)}</code></pre></div>\n'
    )


def _image(self: RendererHTML, tokens: Sequence[Token], at: int, options: Any, env: Any) -> str:
    """A link: a picture would be fetched from another host without the reader's doing."""
    alt = escapeHtml(self.renderInlineAsText(tokens[at].children, options, env) or "picture")
    depth = sum(
        token.nesting for token in tokens[:at] if token.type in ("link_open", "link_close")
    )  # links do not nest
    return alt if depth else f'<a href="{escapeHtml(str(tokens[at].attrs["src"]))}"{_NEW_TAB}>{alt}</a>'


_NEW_TAB = ' target="_blank" rel="noopener noreferrer"'


def _link_open(self: RendererHTML, tokens: Sequence[Token], at: int, *_: Any) -> str:
    return f'<a href="{escapeHtml(str(tokens[at].attrs["href"]))}"{_NEW_TAB}>'


def _table_open(self: RendererHTML, *_: Any) -> str:
    return '<div class="table" tabindex="0"><table>\n'


def _table_close(self: RendererHTML, *_: Any) -> str:
    return "</table></div>\n"


def _cell_open(self: RendererHTML, tokens: Sequence[Token], at: int, *_: Any) -> str:
    # The parser aligns by a style attribute, which the page's policy forbids.
    side = str(tokens[at].attrs.get("style", "")).removeprefix("text-align:")
    return f'<{tokens[at].tag} class="{side}">' if side else f"<{tokens[at].tag}>"
