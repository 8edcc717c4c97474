"""Deep links: a choice on a page is also in the page's address, so that reloading or sharing it shows the same."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

import streamlit as st

_Value = TypeVar("_Value")


def requested(name: str) -> str | None:
    """The address's value of this name; None without one."""
    return st.query_params.get(name)


def adopt(name: str, key: str, allowed: Collection[_Value], *, instead: str = "") -> bool:
    """Let the widget `key`, which has no value yet, begin with the value of `allowed` that the address names.

    Returns False if the address names something else, which the page should then report. With `instead`, which says
    what is shown, `publish` reports it.
    """
    wanted, state = requested(name), st.session_state
    if wanted is None or key in state:
        return True
    found = [value for value in allowed if str(value) == wanted]
    if found:
        state[key] = found[0]
    elif instead:
        state[_refused(name)] = (f"The address names {name} `{wanted}`, which is not here: {instead}.", None)
    return bool(found)


def _refused(name: str) -> str:
    """Session key: the line about the address's unknown value, and the value shown instead, None before it is known."""
    return f"refused-{name}"


def publish(name: str, value: object, default: object = None) -> None:
    """Put `value` into the address; the default stays out of it.

    An unknown value that `adopt` found in the address is reported here, in one line, until the viewer chooses another.
    """
    text, shown = st.session_state.get(_refused(name), ("", None))
    if text and shown in (None, value):
        st.session_state[_refused(name)] = (text, value)
        st.caption(f":orange[{text}]")
    elif text:
        del st.session_state[_refused(name)]
    if value == default or value is None:
        st.query_params.pop(name, None)
    elif requested(name) != str(value):
        st.query_params[name] = str(value)
