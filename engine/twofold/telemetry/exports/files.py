"""Writes a window's tables as a folder of Parquet or CSV files, one per table."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from twofold.api.errors import ConfigError
from twofold.api.whole_file import whole_file
from twofold.telemetry.exports.tables import TableParts, all_tables
from twofold.telemetry.exports.window import ExportWindow
from twofold.telemetry.queries.runs import Database

TableProgress = Callable[[str, int], None]
"""Called with (table, rows written so far)."""


def write_csv(
    db: Database, window: ExportWindow, folder: Path, progress: TableProgress = lambda table, rows: None
) -> Mapping[str, int]:
    """Write FOLDER/TABLE.csv, each file atomically; returns the rows of each table. NULL is an empty field."""
    return {
        table.name: _write_csv_table(table, folder / f"{table.name}.csv", progress)
        for table in all_tables(db, window)
    }


def _write_csv_table(table: TableParts, path: Path, progress: TableProgress) -> int:
    count = 0
    with whole_file(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table.columns)
        for columns in table.parts:
            writer.writerows(zip(*(columns[name] for name in table.columns), strict=True))
            count += len(next(iter(columns.values())))
            progress(table.name, count)
    return count


def write_parquet(
    db: Database, window: ExportWindow, folder: Path, progress: TableProgress = lambda table, rows: None
) -> Mapping[str, int]:
    """Write FOLDER/TABLE.parquet, each file atomically; returns the rows of each table.

    ConfigError if pyarrow is not installed.
    """
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ConfigError(
            "--parquet needs pyarrow; install it with: pip install 'twofold[parquet]', or write --csv"
        ) from None
    return {
        table.name: _write_parquet_table(
            arrow, parquet, table, path=folder / f"{table.name}.parquet", progress=progress
        )
        for table in all_tables(db, window)
    }


def _write_parquet_table(
    arrow: Any, parquet: Any, table: TableParts, *, path: Path, progress: TableProgress
) -> int:
    kinds = {int: arrow.int64(), float: arrow.float64(), str: arrow.string()}
    layout = arrow.schema([(name, kinds[kind]) for name, kind in table.columns.items()])
    count = 0
    with whole_file(path) as part, parquet.ParquetWriter(part, layout, compression="zstd") as writer:
        for columns in table.parts:
            batch = arrow.RecordBatch.from_pydict(columns, schema=layout)
            writer.write_batch(batch)
            count += batch.num_rows
            progress(table.name, count)
    return count
