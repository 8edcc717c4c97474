"""The chat page at `/`: static files, and where each answer token's experts ran."""
