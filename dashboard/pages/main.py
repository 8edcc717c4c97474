"""The dashboard's script: draws the sidebar and the chosen page; `app.py` serves it.

It lies beside the pages: a folder named pages beside the script would turn on Streamlit's own menu.

Reads the telemetry database through twofold.telemetry.queries, read-only. The lab computes on what was read. The
database is the URL on the command line (`streamlit run dashboard/app.py -- URL`), else TWOFOLD_TELEMETRY_URL.
"""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st

_FOLDER = Path(__file__).resolve().parent.parent
if str(_FOLDER.parent) not in sys.path:  # tests run this script alone
    sys.path.insert(0, str(_FOLDER.parent))

from dashboard import controls  # noqa: E402
from dashboard.pages import PAGES  # noqa: E402

st.set_page_config(page_title="Twofold", page_icon=str(_FOLDER / "icon.svg"), layout="wide")
sections: dict[str, list[st.Page]] = {}
for entry in PAGES:
    sections.setdefault(entry.section, []).append(
        st.Page(
            f"{entry.name}.py",
            title=entry.title,
            icon=f":material/{entry.icon}:",
            url_path=entry.name,
            default=entry is PAGES[0],
        )
    )
page = st.navigation(sections)
st.logo(str(_FOLDER / "logo.svg"), size="large")
controls.sidebar()
page.run()
