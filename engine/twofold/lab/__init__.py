"""The lab: plays recorded routing through the engine's own deciding core, to compare policies, systems and machines.

`trace` reads recordings, `replay` counts hits and uploads, `simulate` predicts tokens per second. Nothing here
computes a model; what a replay shows must still be confirmed live.
"""
