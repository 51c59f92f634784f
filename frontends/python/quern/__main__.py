"""`python -m quern` is `quern-tools`."""

import sys

from quern.command_line import main

sys.exit(main())
