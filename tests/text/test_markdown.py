"""Markdown as HTML: what is rendered, what stays text, and blocks that stay while a text grows."""

from __future__ import annotations

import pytest
from twofold.text.markdown.html import html_blocks

TEXT = """# Title

A *word* <b>of</b> &amp; more
next line

| a | b |
|---|--:|
| 1 | 2 |

1. one
   - inner

```py
x < 1
```
"""


def html(text: str) -> str:
    return "".join(block.html for block in html_blocks(text))


def test_common_forms() -> None:
    found = html(TEXT)
    for part in (
        "<h1>Title</h1>",
        "<em>word</em> &lt;b&gt;of&lt;/b&gt; &amp; more<br />",
        '<td class="right">2</td>',
        "<li>inner</li>",
        "<span>py</span>",
        "x &lt; 1",
    ):
        assert part in found
    assert "style=" not in found, "the page's policy forbids styles"


@pytest.mark.parametrize(
    "text",
    [
        "<script>boom()</script>",
        "<img src=x onerror=boom()>",
        "[a](javascript:boom())",
        "[a](data:text/html,boom)",
        "![a](http://far.example/x.png)",
        '[a](http://x.example/"onclick="boom)',
        '```x" onclick="boom\n```',
        "<http://x.example/<script>>",
    ],
)
def test_an_answer_cannot_run_or_fetch_anything(text: str) -> None:
    found = html(text)
    assert "<script" not in found
    assert "<img" not in found
    assert 'href="javascript' not in found
    assert 'href="data' not in found
    assert '" onclick' not in found
    assert '"onclick' not in found


def test_a_picture_is_a_link_and_text_inside_of_a_link() -> None:
    assert '<a href="http://x.example/p.png" target="_blank" rel="noopener noreferrer">alt</a>' in html(
        "![alt](http://x.example/p.png)"
    )
    assert html("[![alt](p.png)](http://x.example/)").count("<a ") == 1


def test_blocks_but_the_last_stay_while_the_text_grows() -> None:
    whole = html_blocks(TEXT)
    for end in range(len(TEXT)):
        begun = html_blocks(TEXT[:end])[:-1]
        assert begun == whole[: len(begun)], TEXT[:end]
