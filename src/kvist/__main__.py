"""`python -m kvist`: the command line."""

import sys

from kvist.cli.main import main

sys.exit(main())
