"""Telemetry: every decision of the engine as a database row.

sink      the protocol for pushing events, and their formats (numpy alone)
schema    the tables
writer    the one thread and connection that write them
queries   what the dashboard reads
summary   one run in a few figures
"""

from twofold.telemetry.sink import LoadSample, NullSink, TelemetrySink

__all__ = ["LoadSample", "NullSink", "TelemetrySink"]
