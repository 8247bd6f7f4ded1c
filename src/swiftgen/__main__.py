"""`python -m swiftgen`."""

import sys

from swiftgen.cli import main

if __name__ == "__main__":
    sys.exit(main())
