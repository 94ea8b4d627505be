"""`python -m toque`: the commands without the console script."""

import sys

from toque.cli import main

if __name__ == "__main__":
    sys.exit(main())
