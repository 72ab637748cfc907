"""The arguments of a job: a Python call on one side, JSON text on the other.

What the signature of a task says is what the handler gets: a UUID goes in, a UUID comes out.
Nothing in a stored payload names code; a value is built only by the type its parameter declares.

What JSON and jsonb do not keep: the order of the keys of a dict; -0.0 comes back as 0.0, the zone
of a datetime as its offset, and where no annotation asks for a float, one of 1e16 or more as the
int it equals.  Of a key given twice, which only foreign SQL can write, the last counts.
"""

from pgqueue.arguments.json_copy import MAX_DEPTH
from pgqueue.arguments.payload import Payload, in_batch
from pgqueue.arguments.text import LARGEST_TEXT, MAX_PAYLOAD_BYTES

__all__ = ["LARGEST_TEXT", "MAX_DEPTH", "MAX_PAYLOAD_BYTES", "Payload", "in_batch"]
