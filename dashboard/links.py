"""Deep links: a choice on a page is also in the page's address, so that reloading or sharing it shows the same."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

import streamlit as st

_Value = TypeVar("_Value")


def requested(name: str) -> str | None:
    """The address's value of this name; None without one."""
    return st.query_params.get(name)


def adopt(name: str, key: str, allowed: Collection[_Value]) -> bool:
    """Let the widget `key`, which has no value yet, begin with the value of `allowed` that the address names.

    Returns False if the address names something else, which the page should then report.
    """
    wanted = requested(name)
    if wanted is None or key in st.session_state:
        return True
    found = [value for value in allowed if str(value) == wanted]
    if found:
        st.session_state[key] = found[0]
    return bool(found)


def publish(name: str, value: object, default: object = None) -> None:
    """Put `value` into the address; the default stays out of it."""
    if value == default or value is None:
        st.query_params.pop(name, None)
    elif requested(name) != str(value):
        st.query_params[name] = str(value)
