"""The dashboard: `streamlit run dashboard/app.py [-- sqlite:///FILE]`; the default database is TWOFOLD_TELEMETRY_URL.

Reads the telemetry database through twofold.telemetry.queries, read-only, and nothing else.
"""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st

_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:  # Streamlit adds the script's directory, not its parent, which holds the package
    sys.path.insert(0, _ROOT)

from dashboard import frame  # noqa: E402

st.set_page_config(page_title="Twofold", page_icon=str(Path(__file__).with_name("icon.svg")), layout="wide")
page = st.navigation(
    [
        st.Page("pages_overview.py", title="Overview", icon=":material/monitoring:", default=True),
        st.Page(
            "pages_placement.py", title="Expert placement", icon=":material/grid_on:", url_path="placement"
        ),
        st.Page("pages_requests.py", title="Requests", icon=":material/search:", url_path="requests"),
        st.Page("pages_loadtest.py", title="Load test", icon=":material/groups:", url_path="loadtest"),
    ]
)
st.logo(str(Path(__file__).with_name("logo.svg")), size="large")
frame.sidebar()
page.run()
