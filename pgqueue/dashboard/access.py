"""Who looks at the dashboard, and what this user may do."""

from collections.abc import Collection
from dataclasses import dataclass

from pgqueue.errors import OptionError
from pgqueue.operations.actions import ACTIONS

VIEW = "view"
RIGHTS = frozenset(
    (
        VIEW,
        "view_arguments",
        "view_results",
        *(action.right for action in ACTIONS.values() if action.right),
    )
)
"""All rights.  ``view`` shows every page without arguments, results and tracebacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What ``authorize`` returns for a request.

    Args:
        user: Who it is; written into the log of every action.
        rights: Names of rights; by default only ``view``.
        queues: If given, the user sees only the jobs of these queues, and acts on no other.
        tags: If given, the user sees only the jobs with one of these tags, and acts on no other.

    Raises:
        OptionError: A right does not exist.
    """

    user: str
    rights: Collection[str] = (VIEW,)
    queues: Collection[str] | None = None
    tags: Collection[str] | None = None

    def __post_init__(self) -> None:
        if unknown := set(self.rights) - RIGHTS:
            raise OptionError(
                f"Access: there is no right {sorted(unknown)[0]!r}; there are "
                f"{', '.join(sorted(RIGHTS))}"
            )
        for name in ("rights", "queues", "tags"):
            if isinstance(getattr(self, name), str):
                raise OptionError(f"Access: {name} is one text; give a set of them")
        if not isinstance(self.user, str) or not self.user:
            raise OptionError("Access: user must be a text that is not empty; the log names them")

    @property
    def is_limited(self) -> bool:
        """Whether the user sees only some of the jobs."""
        return self.queues is not None or self.tags is not None
