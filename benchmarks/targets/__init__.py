"""What the CPU half is meant to reach: every check gives lines of target, figure and verdict."""
