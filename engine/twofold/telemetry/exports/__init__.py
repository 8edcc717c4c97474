"""Exports a run for other programs: Perfetto's trace viewer, and tables as Parquet or CSV files.

window    the exported part of a run
perfetto  one file of trace events: steps, layers, devices, link lanes and requests on a time axis
trace     the trace events themselves
tables    the rows of every table, with the experts of each token unpacked
files     Parquet and CSV files of these rows
"""

from twofold.telemetry.exports.files import write_csv, write_parquet
from twofold.telemetry.exports.perfetto import write_perfetto
from twofold.telemetry.exports.window import ExportWindow, export_window

__all__ = ["ExportWindow", "export_window", "write_csv", "write_parquet", "write_perfetto"]
