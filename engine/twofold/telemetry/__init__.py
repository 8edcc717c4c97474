"""Telemetry: every decision of the engine as a database row.

sink      the interface that events are pushed to, and their formats (needs only numpy)
schema    the tables
writer    the one thread and connection that write them
queries   what the dashboard reads
summary   the main figures of a run
"""

from twofold.telemetry.sink import LoadSample, TelemetrySink

__all__ = ["LoadSample", "TelemetrySink"]
