"""`python -m swiftgen`."""

import sys

from swiftgen.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
