"""Prefix cache: pages and snapshots of earlier computation, in memory and on disk."""
