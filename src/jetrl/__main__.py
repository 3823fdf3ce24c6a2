"""`python -m jetrl` is `jetrl`."""

from __future__ import annotations

import sys

from jetrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
