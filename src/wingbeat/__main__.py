"""`python -m wingbeat`: the same as the `wingbeat` command."""

import sys

from wingbeat.cli.main import main

sys.exit(main())
