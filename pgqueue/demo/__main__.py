"""``python -m pgqueue.demo`` is ``pgqueue demo``."""

import sys

from pgqueue.demo import start_over

if __name__ == "__main__":
    start_over(sys.argv[1:])
