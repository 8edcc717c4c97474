"""The OpenAI-compatible HTTP server.

`app.create_app` builds the FastAPI application around an engine; `process.serve` runs it as a process with a
socket, signals and a drain. Needs the extra `twofold[server]`; nothing outside this package and `cli.serve`
imports it.
"""
