"""`twofold placement`: show, export and import which experts are in slots."""
