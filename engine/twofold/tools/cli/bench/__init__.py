"""`twofold bench`: speed of this machine and of a server."""
