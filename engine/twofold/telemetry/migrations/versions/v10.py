"""Columns of table request about its pictures."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "10"
down_revision = "9"

_INTEGER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")
_COLUMNS: list[tuple[str, Any, str]] = [
    ("encode_s", sa.Float(), "wall: pictures fetched and encoded"),
    ("num_pictures", _INTEGER, "pictures of the prompt"),
    ("image_tokens", _INTEGER, "prompt tokens that stand for rows of pictures"),
    ("picture_pixels", _INTEGER, "pixels of the pictures as sent"),
]


def upgrade() -> None:
    for name, kind, comment in _COLUMNS:
        column = sa.Column(name, kind, server_default=sa.text("0"), nullable=False, comment=comment)
        op.add_column("request", column)
    comment = "with --telemetry-text: small views of the pictures, a JSON list of JPEG files in base64"
    op.add_column("request", sa.Column("pictures_json", sa.Text(), nullable=True, comment=comment))
