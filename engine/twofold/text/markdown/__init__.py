"""Markdown of answers: parsed by markdown-it-py without HTML, written for a browser or a terminal."""
