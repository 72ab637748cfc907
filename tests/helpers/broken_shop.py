"""A queue whose jobs fail until it is repaired, for the pages of failures."""

from dataclasses import dataclass

from sqlalchemy import Engine, select
from visitor import SECRET

from pgqueue import DeadLetter, Job, JobStatus, PgQueue, Secret, Worker


@dataclass
class Shop:
    """A queue with the task ``send``, which fails while ``is_broken``."""

    engine: Engine

    def __post_init__(self) -> None:
        self.is_broken = True
        self.queue = PgQueue(self.engine, secret=SECRET)

        @self.queue.task(name="send", max_attempts=1)
        def send(to: str, token: Secret[str] = "") -> None:
            if self.is_broken:
                raise ConnectionError(f"no mail server for {to}")

    def enqueue(self, number: int = 1, *, to: str = "ada", queue: str = "default") -> list[int]:
        send = self.queue.tasks["send"].options(queue=queue, tags=[f"for-{to}"])
        with self.queue.session() as session, session.begin():
            return send.enqueue_many(session, [(to,)] * number)

    def fail(self, number: int = 1, *, to: str = "ada", queue: str = "default") -> list[int]:
        """Jobs that have failed."""
        ids = self.enqueue(number, to=to, queue=queue)
        self.work()
        return ids

    def work(self) -> None:
        Worker(self.queue, ["*"]).run_until_empty(timeout=60)

    @property
    def fingerprint(self) -> int:
        with self.queue.session() as session:
            found = session.scalars(select(DeadLetter.fingerprint).limit(1)).one()
        assert found is not None
        return found

    def statuses(self) -> dict[int, JobStatus]:
        with self.queue.session() as session:
            return {job.id: job.status for job in session.scalars(select(Job))}
