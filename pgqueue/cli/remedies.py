"""Remedies for rows that break a rule: commands and SQL, in the order to run them."""

from pgqueue.models import SCHEMA
from pgqueue.repository import Violation

_CANCEL = "pgqueue cancel {id}"
_REQUEUE = "pgqueue requeue {id}"
_WORK = "pgqueue worker"
_NO_MESSAGE = 'DELETE FROM "{schema}".message_queue WHERE target_id = {id}'
_NOT_WAITING = 'DELETE FROM "{schema}".waiting_messages WHERE target_id = {id}'

REMEDIES: dict[str, tuple[str, ...]] = {
    "an unfinished job has a message or a lease": (_CANCEL, _REQUEUE),
    "attempts never exceed max_attempts": (
        'UPDATE "{schema}".jobs SET attempts = max_attempts WHERE id = {id}',
    ),
    "a message has a job": (_NO_MESSAGE,),
    "a job has at most one message": (
        'DELETE FROM "{schema}".message_queue WHERE target_id = {id} AND id < '
        '(SELECT max(id) FROM "{schema}".message_queue WHERE target_id = {id})',
    ),
    "a message stands where its job says": (_NO_MESSAGE, _CANCEL, _REQUEUE),
    "a message beside a lease is the one the lease holds": (_NO_MESSAGE,),
    "a lease has a job": ('DELETE FROM "{schema}".leases WHERE target_id = {id}',),
    # Every worker looks for them twice a second.
    "a lease has an owner that lives, or is rescued within a minute": (_WORK,),
    "a dead letter says what its job says": (
        'DELETE FROM "{schema}".dead_letters WHERE job_id = {id}',
    ),
    "a failed or cancelled job has a dead letter": (
        'INSERT INTO "{schema}".dead_letters (job_id, outcome, queue, task, finished_at) '
        'SELECT id, outcome, queue, task, finished_at FROM "{schema}".jobs WHERE id = {id} '
        "ON CONFLICT (job_id) DO UPDATE SET outcome = excluded.outcome",
    ),
    "a waiting message has an unfinished job": (_NOT_WAITING,),
    "a waiting message stands where its job says": (_NOT_WAITING, _CANCEL, _REQUEUE),
    "a waiting job has neither message nor lease": (_NOT_WAITING,),
    "an admitted job has a place in each of its limits": (
        'INSERT INTO "{schema}".limit_places (limit_key, job_id) '
        "SELECT unnest(string_to_array(limit_keys, chr(10))), id "
        'FROM "{schema}".jobs WHERE id = {id} ON CONFLICT DO NOTHING',
    ),
    "a job of a batch has its batch": (
        'DELETE FROM "{schema}".batch_jobs WHERE job_id = {id} AND NOT EXISTS '
        '(SELECT FROM "{schema}".batches WHERE id = batch_id)',
    ),
    "no job is added to a batch after its end": (
        'DELETE FROM "{schema}".batch_jobs USING "{schema}".batches '
        "WHERE id = batch_id AND job_id = {id} AND ended_at IS NOT NULL",
    ),
    # A worker ends it again.
    "an ended batch has enqueued its callback": (
        'UPDATE "{schema}".batches SET ended_at = NULL, outcome = NULL, total = NULL '
        'FROM "{schema}".batch_jobs WHERE id = batch_id AND job_id = {id} AND callback_id IS NULL',
    ),
    "an ended job holds no unique key": (
        'UPDATE "{schema}".jobs SET held_unique_key = NULL WHERE id = {id}',
    ),
    "a succeeded job was attempted": ('UPDATE "{schema}".jobs SET attempts = 1 WHERE id = {id}',),
}
"""By the text of the rule.  If a job breaks several rules, apply them in the order of the check."""


def remedy_for(violation: Violation) -> tuple[str, ...]:
    """The steps that repair the row."""
    return tuple(
        step.format(id=violation.job_id, schema=SCHEMA) for step in REMEDIES[violation.rule]
    )
