"""``python -m benchmarks``: runs :mod:`benchmarks.loss`, the benchmark of linear and loss."""

import sys

from benchmarks.loss.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
