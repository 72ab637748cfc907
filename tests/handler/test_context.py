"""What a handler reads of its job, and cannot write."""

import json
import pickle
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from pgqueue import Job, JobContext, PgQueue, PgQueueError, Worker
from pgqueue.context import ReadOnlyMeta

HOUR = timedelta(hours=1)


@pytest.fixture
def queue(engine: Engine) -> PgQueue:
    return PgQueue(engine)


def result_of(queue: PgQueue, job_id: int) -> Any:
    assert Worker(queue).run_until_empty(timeout=60) == {"succeeded": 1}
    with queue.session() as session:
        return session.get_one(Job, job_id).result


@pytest.mark.parametrize(
    "write",
    [
        lambda meta: meta.__setitem__("a", 2),
        lambda meta: meta.__delitem__("a"),
        lambda meta: meta.update(a=2),
        lambda meta: meta.setdefault("b", 2),
        lambda meta: meta.pop("a"),
        lambda meta: meta.clear(),
        lambda meta: meta.__ior__({"a": 2}),
    ],
)
def test_meta_refuses_every_write(write: Any) -> None:
    meta = ReadOnlyMeta(a=1)

    with pytest.raises(PgQueueError, match=r"ctx\.meta cannot be changed: .* would be lost"):
        write(meta)

    assert meta == {"a": 1}
    assert json.loads(json.dumps(meta)) == pickle.loads(pickle.dumps(meta)) == {"a": 1}


def test_a_handler_that_writes_meta_is_told(queue: PgQueue) -> None:
    @queue.task(name="t")
    def note(ctx: JobContext) -> str:
        assert ctx.meta == {"a": 1}
        with pytest.raises(PgQueueError, match="cannot be changed"):
            ctx.meta["a"] = 2  # type: ignore[index]
        return "told"

    assert result_of(queue, note.options(meta={"a": 1}).delay().id) == "told"


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_handler_knows_how_long_it_may_still_run(queue: PgQueue, executor: Any) -> None:
    @queue.task(name="t", executor=executor, timeout=HOUR)
    def note(ctx: JobContext) -> bool:
        first, second = ctx.time_left(), ctx.time_left()
        assert first is not None
        assert second is not None
        return HOUR >= first >= second > timedelta(minutes=1)

    assert result_of(queue, note.delay().id) is True


def test_without_a_timeout_no_time_is_left_to_tell(queue: PgQueue) -> None:
    @queue.task(name="t", timeout=HOUR)
    def note(ctx: JobContext) -> bool:
        return ctx.time_left() is None

    assert note() is True
    assert result_of(queue, note.options(timeout=None).delay().id) is True
