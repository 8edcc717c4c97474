"""Load on an OpenAI-compatible server, over HTTP only: who sends what and when, what came back, what that means."""
