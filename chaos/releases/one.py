"""What a worker of release one imports."""

from chaos.chores import queue
from chaos.releases import one

one(queue)
