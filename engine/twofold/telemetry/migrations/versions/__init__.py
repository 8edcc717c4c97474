"""Revisions of the schema, found by Alembic by their files."""
