"""Run the command line as ``python -m vardass``."""

import sys

from vardass.cli import main

if __name__ == "__main__":
    sys.exit(main())
