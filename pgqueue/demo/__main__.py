"""``python -m pgqueue.demo`` is ``pgqueue demo``."""

import sys

from pgqueue.demo import restart

restart(["demo", *sys.argv[1:]])
