"""`python -m twofold.cli`: the command without an installed entry point."""

import sys

from twofold.cli.main import main

sys.exit(main())
