"""What a worker of release two imports."""

from chaos.chores import queue
from chaos.releases import two

two(queue)
