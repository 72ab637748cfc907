"""The arguments of a job: converts between a Python call and JSON text.

The handler gets values of the types that the task's signature declares: a UUID is stored, a UUID is
passed.  Nothing in a stored payload names code; only the declared type of a parameter builds its
value.

JSON and jsonb do not preserve: the order of the keys of a dict; -0.0, which becomes 0.0; the zone
of a datetime, which becomes its offset; and, where no annotation asks for a float, a float of 1e16
or more, which becomes the equal int.  Of duplicate keys, which only foreign SQL can write, the last
counts.
"""

from pgqueue.arguments.forms import SCALARS, Encoder
from pgqueue.arguments.payload import Payload, in_batch
from pgqueue.arguments.refusals import MAX_DEPTH, OtherVersion
from pgqueue.arguments.text import LARGEST_TEXT, MAX_PAYLOAD_BYTES

__all__ = [
    "LARGEST_TEXT",
    "MAX_DEPTH",
    "MAX_PAYLOAD_BYTES",
    "SCALARS",
    "Encoder",
    "OtherVersion",
    "Payload",
    "in_batch",
]
