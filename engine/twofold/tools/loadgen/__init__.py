"""Load generator for OpenAI-compatible servers, over HTTP only: workload, sending, answers, metrics."""
