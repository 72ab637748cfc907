"""Log lines as JSON: ``pgqueue worker --log-format json``.

Needs the extra ``json``.
"""

import copy
import json
import logging
from typing import Any

from pythonjsonlogger.json import JsonFormatter


class JsonLines(JsonFormatter):
    """Writes a record as one line: time, level, logger, message, and what is in ``extra``.

    A number that JSON has not, such as NaN, is null.
    """

    def __init__(self) -> None:
        names = {"levelname": "level", "name": "logger", "exc_info": "exception"}
        super().__init__("%(levelname)s%(name)s%(message)s", timestamp=True, rename_fields=names)

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_text:  # secrets are masked there, but not in the exception
            record = copy.copy(record)
            record.exc_info = None
        return super().format(record)

    def jsonify_log_record(self, log_data: dict[str, Any]) -> str:
        line = super().jsonify_log_record(log_data)
        if "NaN" in line or "Infinity" in line:  # which no JSON has
            line = json.dumps(json.loads(line, parse_constant=lambda _: None))
        return line
