"""Ranks: processes, on one machine or several, that share one model's weights."""
