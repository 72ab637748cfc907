"""Signed tokens that stand for the ids of jobs, which are consecutive and can be guessed.

A token is made by itsdangerous: the id and the time of its making, signed and not encrypted.
"""

from datetime import timedelta

from itsdangerous import BadData, SignatureExpired, URLSafeTimedSerializer

from pgqueue.errors import BadToken

PURPOSE = "pgqueue.job_token"
"""Keeps apart what others sign with the same secret."""


def token_of(secret: str, job_id: int) -> str:
    """The token of a job's id."""
    return str(URLSafeTimedSerializer(secret, salt=PURPOSE).dumps(job_id))


def id_in_token(secret: str, token: str, *, max_age: timedelta) -> int:
    """The id in a token that is at most so old.

    Raises BadToken.
    """
    try:
        job_id: int = URLSafeTimedSerializer(secret, salt=PURPOSE).loads(
            token, max_age=max_age // timedelta(seconds=1)
        )
    except SignatureExpired as error:
        raise BadToken("the token has expired; make a new one") from error
    except (BadData, TypeError) as error:  # TypeError: it is no text
        raise BadToken("the token was not made by this application, or was changed") from error
    return job_id
