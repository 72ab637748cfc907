"""The arguments of a job: a Python call on one side, JSON text on the other.

What the signature of a task says is what the handler gets: a UUID goes in, a UUID comes out.
Nothing in a stored payload names code; a value is built only by the type its parameter declares.
"""

from pgqueue.payload.payload import Payload
from pgqueue.payload.plain import MAX_DEPTH
from pgqueue.payload.text import MAX_PAYLOAD_BYTES

__all__ = ["MAX_DEPTH", "MAX_PAYLOAD_BYTES", "Payload"]
