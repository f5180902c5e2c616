"""``python -m benchmarks``: :mod:`benchmarks.loss`, the benchmark of the layer itself."""

import sys

from benchmarks.loss.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
