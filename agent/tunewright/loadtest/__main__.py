"""`python -m tunewright.loadtest`: the load test without the rest of the command line, so that it starts fast."""

import sys

from tunewright.loadtest.run import main

sys.exit(main())
