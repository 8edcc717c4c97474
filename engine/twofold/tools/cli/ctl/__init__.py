"""`twofold ctl`: inspect and change a running server."""
