"""The dashboard's server: `streamlit run dashboard/app.py [-- sqlite:///FILE]`; `pages/main.py` draws the pages."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Final

import streamlit
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.routing import Route
from streamlit.starlette import App

_FOLDER: Final = Path(__file__).resolve().parent
if (
    str(_FOLDER.parent) not in sys.path
):  # Streamlit adds the script's directory, not its parent, which is the package's
    sys.path.insert(0, str(_FOLDER.parent))

from dashboard import controls, frame, parts  # noqa: E402, F401 -- imported before the first visit, which took 0.5 s more
from dashboard.pages import PAGES  # noqa: E402

_STATIC: Final = Path(streamlit.__file__).parent / "static"
# Without this, a browser that opens /placement first looks for the server below /placement/ and reports its 404s.
_OWN_ADDRESS: Final = "<script>window.__streamlit = {BACKEND_BASE_URL: window.location.origin}</script>"
# Plotly takes half of a first visit's time; with this the browser loads it beside the page's script.
_PRELOAD: Final = "".join(
    f'<link rel="modulepreload" crossorigin href="/{chunk.relative_to(_STATIC)}">'
    for chunk in _STATIC.glob("static/js/PlotlyChart.*.js")
)
# Streamlit's menu puts each section's entries into a <div> of the list: screen readers then count no entry.
_LISTS: Final = """<script>new MutationObserver((_, observer) => {
  const menu = document.querySelector("[data-testid=stSidebarNavItems]");
  if (!menu) return;
  menu.role = "none";
  for (const section of menu.children) if (section.tagName === "DIV") section.role = "list";
  observer.disconnect();
}).observe(document.documentElement, {childList: true, subtree: true})</script>"""
_CROSSHAIR: Final = f"<script>{(_FOLDER / 'crosshair.js').read_text(encoding='utf-8')}</script>"
_INDEX: Final = (
    (_STATIC / "index.html")
    .read_text(encoding="utf-8")
    .replace("<head>", f"<head>{_OWN_ADDRESS}{_LISTS}{_CROSSHAIR}{_PRELOAD}", 1)
    .replace("<title>Streamlit</title>", "<title>Twofold</title>", 1)
)


async def _index(_request: Request) -> HTMLResponse:
    return HTMLResponse(_INDEX, headers={"Cache-Control": "no-cache"})


async def _to_index(request: Request) -> RedirectResponse:
    """The first page has no path of its own; without this, Streamlit says that /overview does not exist."""
    return RedirectResponse(f"/?{request.url.query}" if request.url.query else "/")


app = App(
    _FOLDER / "pages" / "main.py",
    routes=[
        Route("/", _index),
        Route(f"/{PAGES[0].name}", _to_index),
        *(Route(f"/{page.name}", _index) for page in PAGES[1:]),
    ],
)
# Streamlit collects garbage after each refresh. Modules and their data never become garbage: not to look at them again
# halves what a viewer costs.
gc.collect()
gc.freeze()
