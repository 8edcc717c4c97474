"""Models of the server: their engines, the crossing to an engine's thread, and what all models share."""
