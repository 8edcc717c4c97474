"""Performance targets of the CPU half: every check returns lines of target, figure and verdict."""
