"""`python -m twofold.tools.cli`: the command without an installed entry point."""

import sys

from twofold.tools.cli.main import main

sys.exit(main())
