"""MkDocs hooks: the site's menu is docs/README.md's tables, and CONTRIBUTING.md and CHANGELOG.md are pages too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).resolve().parents[1]
TOP_PAGES: Final = {"CONTRIBUTING.md": "contributing/index.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the repository's top folder, with their paths in the site."""
_SECTION: Final = re.compile(r"^## (.+)$|^\| \[([^]]+)\]\(([^)]+)\)", re.MULTILINE)


def menu(index: str) -> list[dict[str, Any]]:
    """The site's menu from the text of docs/README.md: a section per heading, a page per row of its table."""
    sections: list[tuple[str, list[dict[str, str]]]] = []
    for heading, title, path in _SECTION.findall(index):
        if heading:
            sections.append((heading, []))
        else:
            sections[-1][1].append({title: path})
    return [{"Twofold": "README.md"}, *({title: pages} for title, pages in sections)]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    nav = menu((ROOT / "docs/README.md").read_text(encoding="utf-8"))
    contributing = next(section["Contributing"] for section in nav if "Contributing" in section)
    contributing.insert(0, TOP_PAGES["CONTRIBUTING.md"])
    config.nav = [*nav, {"Changelog": TOP_PAGES["CHANGELOG.md"]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, path in TOP_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        depth = "../" * path.count("/")
        text = re.sub(r"\]\(docs/", f"]({depth}", text)
        files.append(
            File.generated(config, path, content=text.replace("](CHANGELOG.md)", f"]({depth}changelog.md)"))
        )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to top pages, as they stand in the repository, lead to their pages of the site."""
    for source, path in TOP_PAGES.items():
        up = "../" * page.file.src_uri.count("/")
        markdown = markdown.replace(f"](../{up}{source}", f"]({up}{path}")
    return markdown
