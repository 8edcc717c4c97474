"""The lab: replays recorded routing through the engine's scheduling core, to compare policies, systems and machines.

`trace` reads recordings, `replay` counts hits and uploads, `simulate` predicts tokens per second. No model is computed
here; the results of a replay must be confirmed live.
"""
