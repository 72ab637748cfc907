"""Duties of one list: one that fails or is put off stops no other, and asks nothing."""

from threading import Event

from sqlalchemy import Connection, Engine, text

from pgqueue.database.settings import UPKEEP
from pgqueue.worker.duty_list import Duty, DutyList
from pgqueue.worker.loop import NEVER
from pgqueue.worker.outage import Outage


class Notes(Duty):
    """Notes that it has run."""

    def __init__(self, sql: str = "SELECT 1") -> None:
        super().__init__(repeat_after=NEVER)
        self.has_run = Event()
        self._sql = text(sql)

    def step(self, connection: Connection) -> float:
        self.has_run.set()
        with connection.begin():
            connection.execute(self._sql)
        return NEVER


class PutOff(Notes):
    """Is put off each time."""

    times = 0

    def puts_off(self) -> float:
        self.times += 1
        return 0.01


def run(engine: Engine, *duties: Duty, until: Event) -> DutyList:
    duty_list = DutyList(engine, UPKEEP, Outage(), duties, name="upkeep")
    duty_list.start()
    assert until.wait(60)
    duty_list.stop(seconds=60)
    assert duty_list.failure is None
    return duty_list


def test_a_duty_that_the_database_refuses_stops_no_other(engine: Engine) -> None:
    refused, other = Notes("SELECT 1 / 0"), Notes()

    run(engine, refused, other, until=other.has_run)

    assert refused.has_run.is_set()


def test_a_duty_that_is_put_off_looks_like_no_answer_of_the_database(engine: Engine) -> None:
    """After it is lost, only a statement that has succeeded shows that it is back."""
    duty, looked = PutOff(), Event()
    outage = Outage()
    outage.record_error(ConnectionError("gone"), name="here", opened_at=0.0)
    duty_list = DutyList(engine, UPKEEP, outage, [duty], name="upkeep")
    duty_list.start()
    while duty.times < 5:
        looked.wait(0.01)
    is_open = duty_list.reconnecting.is_open
    duty_list.stop(seconds=60)

    assert not is_open
    assert not duty.has_run.is_set()
