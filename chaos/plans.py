"""The plans of statements as they are really run, told by the server itself."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Engine, event

AUTO_EXPLAIN = {
    "session_preload_libraries": "auto_explain",
    "auto_explain.log_min_duration": "0",
    "auto_explain.log_analyze": "on",
    "auto_explain.log_buffers": "on",
    "auto_explain.log_format": "json",
    "client_min_messages": "log",
}
TELLING = {"options": " ".join(f"-c {name}={value}" for name, value in AUTO_EXPLAIN.items())}
"""The ``connect_args`` of a connection whose server reports the plan of each statement."""


@dataclass(frozen=True)
class Plan:
    """Every node of one plan, and how many pages it touched."""

    nodes: list[dict[str, Any]]
    is_compiled: bool = False

    @classmethod
    def of(cls, document: dict[str, Any]) -> "Plan":
        """The plan in what EXPLAIN (FORMAT JSON) has printed."""
        return cls(list(_nodes(document["Plan"])), is_compiled="JIT" in document)

    @property
    def buffers(self) -> int:
        top = self.nodes[0]
        return int(top["Shared Hit Blocks"] + top["Shared Read Blocks"])

    def pages_to_find(self, table: str) -> int:
        """How many pages were touched to find rows of this table by an index."""
        found = [node for node in self.nodes if node.get("Relation Name") == table]
        scans = [node for node in found if "Index Name" in node]
        return sum(int(one["Shared Hit Blocks"] + one["Shared Read Blocks"]) for one in scans)

    def rows_of(self, table: str) -> int:
        """How many rows of this table were read, before filters of other nodes."""
        found = [node for node in self.nodes if node.get("Relation Name") == table]
        names = ("Actual Rows", "Rows Removed by Filter")
        rows = [sum(node.get(name, 0) for name in names) * node["Actual Loops"] for node in found]
        return int(sum(rows))

    @property
    def has_sort(self) -> bool:
        return any("Sort" in node["Node Type"] for node in self.nodes)

    def scans_of(self, table: str) -> set[str]:
        """How a table is read, with the index that is used."""
        return {
            " ".join(filter(None, (node["Node Type"], node.get("Index Name"))))
            for node in self.nodes
            if node.get("Relation Name") == table and node["Node Type"] != "ModifyTable"
        }

    @property
    def whole_scans(self) -> list[str]:
        """Tables that are read from end to end, be it through an index."""
        return [
            node["Relation Name"]
            for node in self.nodes
            if "Index Name" in node and not {"Index Cond", "Order By"} & node.keys()
        ]


@dataclass
class Plans:
    """The plans of what was run on one connection."""

    seen: list[Plan] = field(default_factory=list)

    @property
    def only(self) -> Plan:
        [plan] = self.seen
        return plan

    def hear(self, notice: Any) -> None:
        _, separator, document = str(notice.message_primary).partition("plan:\n")
        if separator:
            self.seen.append(Plan.of(json.loads(document)))


@contextmanager
def plans_of(connection: Connection) -> Iterator[Plans]:
    """Collect the plans of what is run in the block."""
    plans = Plans()
    driver: Any = connection.connection.driver_connection
    driver.add_notice_handler(plans.hear)
    try:
        yield plans
    finally:
        driver.remove_notice_handler(plans.hear)


def prepare_at_once(engine: Engine) -> Engine:
    """Have the server keep and reuse the plan of every statement from its first run on."""

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: Any) -> None:
        connection.prepare_threshold = 0

    return engine


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from _nodes(child)
