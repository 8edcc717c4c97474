"""`twofold loadtest`: users of a running server, and the highest rate that it serves well."""
