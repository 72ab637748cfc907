"""Signed tokens that stand for the ids of jobs, which are consecutive and can be guessed.

A token is the id and the time of its making in microseconds, each in eight bytes, and the first
half of their HMAC-SHA256, in URL-safe base64.  It is signed and not encrypted.
"""

import hmac
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode

from pgqueue.errors import BadToken

SIGNED = struct.Struct(">qQ")
PURPOSE = b"pgqueue.job_token:"
"""Keeps apart what others sign with the same secret."""
HALF = 16


def token_of(secret: str, job_id: int, microseconds: int) -> str:
    """The token that was made of a job's id at this time since 1970."""
    signed = SIGNED.pack(job_id, microseconds)
    signature = hmac.digest(secret.encode(), PURPOSE + signed, "sha256")
    return urlsafe_b64encode(signed + signature[:HALF]).rstrip(b"=").decode()


def id_in_token(secret: str, token: str, *, now: int, max_age: int) -> int:
    """The id in a token that is at most ``max_age`` old, both in microseconds.

    Raises BadToken.
    """
    job_id: int
    try:
        job_id, made_at = SIGNED.unpack(urlsafe_b64decode(f"{token}=")[:-HALF])
        is_ours = hmac.compare_digest(token_of(secret, job_id, made_at), token)
    except (TypeError, ValueError, struct.error):
        is_ours = False
    if not is_ours:
        raise BadToken("the token was not made by this application, or was changed")
    if now - made_at > max_age:
        raise BadToken(f"the token of job {job_id} has expired; make a new one")
    return job_id
