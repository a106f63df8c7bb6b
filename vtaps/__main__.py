"""`python -m vtaps` is the `vtaps` command."""

import sys

from vtaps.cli import main

if __name__ == "__main__":
    sys.exit(main())
