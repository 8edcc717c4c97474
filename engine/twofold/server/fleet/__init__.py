"""Replicas of a server on Ray Serve: a gateway, a router that finds cached prefixes, and scaling by objective."""
