"""Background jobs for SQLAlchemy applications, committed together with your rows.

docs/explanation/architecture.md describes the packages and the order of their imports.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgqueue.public import *  # noqa: F403
    from pgqueue.public import __all__ as __all__
else:
    # The first use of a name imports them all.  `pgqueue --help` uses none, and need not wait for
    # SQLAlchemy.

    def __getattr__(name: str) -> object:
        if name != "__all__" and not name[0].isupper():  # a module, or what a tool looks for
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from pgqueue import public

        return getattr(public, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
