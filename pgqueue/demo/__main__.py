"""``python -m pgqueue.demo`` does the same as ``pgqueue demo``."""

import sys

from pgqueue.demo import restart

restart(["demo", *sys.argv[1:]])
