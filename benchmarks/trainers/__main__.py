"""``python -m benchmarks.trainers``: the loops of this package, by :mod:`benchmarks.training`."""

import sys

from benchmarks.training.__main__ import main

if __name__ == "__main__":
    sys.exit(main(trainers=True))
