"""Measurements of running servers, over HTTP."""
