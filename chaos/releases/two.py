"""What a worker of release two imports."""

from chaos.releases import two
from chaos.sample_tasks import queue

two(queue)
