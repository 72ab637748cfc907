"""What a worker of release one imports."""

from chaos.releases import one
from chaos.sample_tasks import queue

one(queue)
