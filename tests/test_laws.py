"""The rules of the house that no linter knows.

The floors themselves are contracts of import-linter, in pyproject.toml; it cannot name a
subpackage of an external package.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

import pgqueue

PACKAGE = Path(pgqueue.__file__).parent
ASYNC_DOOR = "database/async_sessions.py"

DOORS = ("cli", "demo", "embedded", "flask")
"""Programs of their own: they open sessions, commit them, and show SQL to their users."""
STATEMENT = re.compile(
    r"\s*(?:SELECT|INSERT|UPDATE|DELETE|SET|RESET|BEGIN|COMMIT|SAVEPOINT|RELEASE|ROLLBACK|LISTEN"
    r"|NOTIFY|LOCK|DO|WITH|CREATE|ALTER|DROP|GRANT|REVOKE|TRUNCATE)\s+[\w{$(*]"
)

CARRIERS = ("database", "handler", "worker")
"""Between the enqueue of a job and its handler; most of them do not look at its arguments."""
SCHEDULER = "worker/duties/ticks.py"
"""Enqueues with the arguments of a schedule."""

# The migrations are reached by a link, and are Alembic's to import.
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "migrations" not in path.parts)


def test_only_the_async_door_imports_the_asyncio_of_sqlalchemy() -> None:
    assert found_in(async_imports, but=(ASYNC_DOOR,)) == {}


def test_the_async_door_imports_the_asyncio_of_sqlalchemy_only_when_it_is_used() -> None:
    """SQLAlchemy 2.1 installs greenlet only with an extra: an import at the top would need it."""
    at_import = set(imports_at_run_time(tree_of(PACKAGE / ASYNC_DOOR), into_functions=False))

    assert not any(name.startswith("sqlalchemy.ext") for name in at_import)


def test_no_module_is_named_after_the_standard_library() -> None:
    names = {path: path.parent.name if path.stem == "__init__" else path.stem for path in MODULES}

    alike = [path for path, name in names.items() if name in sys.stdlib_module_names]

    assert [path for path in alike if path.stem != "__main__"] == []


def test_statements_are_written_only_in_their_package() -> None:
    """But for the DDL and the grants of the schema."""
    assert found_in(sql_in, but=("repository", "schema", *DOORS)) == {}


def test_one_place_logs() -> None:
    """It lets through nothing that code of the application raises; programs set handlers up."""
    assert found_in(loggers_in, but=("redaction.py", "cli")) == {}


def test_only_the_database_package_commits() -> None:
    assert found_in(commits_in, but=("database", *DOORS)) == {}


def test_no_statement_deletes_because_a_join_was_empty() -> None:
    """A row may be hidden: a function that deletes what lacks another row asks ``sees_all``."""
    assert found_in(deletes_what_lacks_a_row, but=()) == {}


def test_the_arguments_of_a_job_cross_ten_files_at_most() -> None:
    """The page lists the files; the code between them and around them carries jobs as a whole."""
    page = (PACKAGE.parent / "docs" / "explanation" / "architecture.md").read_text("utf-8")
    way = page.partition("## A job's way through the code")[2]
    listed = re.findall(r"^\d+\. `([\w/]+\.py)`", way, re.MULTILINE)
    carrying = [module for module in MODULES if is_in(module, *CARRIERS)]

    looking = {
        str(module.relative_to(PACKAGE)) for module in carrying if reads_args(tree_of(module))
    }

    assert 1 <= len(listed) <= 10
    assert [name for name in listed if not (PACKAGE / name).is_file()] == []
    assert looking - set(listed) == {SCHEDULER}


def test_each_attribute_of_a_class_is_read() -> None:
    """Or is for the library from whose class it derives: a misspelt one would have no effect."""
    read = {name for module in MODULES for name in attributes_read(tree_of(module))}
    unread = [
        f"{module.relative_to(PACKAGE)}: {owner}.{name}"
        for module in MODULES
        for owner, name in attributes_of_classes(tree_of(module))
        if name not in read and not is_of_library(module, owner, name)
    ]

    assert unread == []


def test_what_the_laws_look_for_is_found() -> None:
    tree = ast.parse(
        '"""SET nothing: a docstring."""\n'
        'a = f"SET LOCAL {name} = 1"\nb = "Set the table"\nconnection.commit()\n'
    )

    assert list(sql_in(tree)) == ["SET LOCAL "]
    deleting = "def drop():\n    return sa.delete(leases).where(~sa.exists(workers))"
    assert list(deletes_what_lacks_a_row(ast.parse(deleting))) == ["drop"]
    assert list(calls_in(tree)) == ["connection.commit"]


def test_an_import_for_the_type_checker_is_told_from_one_at_run_time() -> None:
    source = (
        "import sqlalchemy.ext.asyncio\n"
        "if TYPE_CHECKING:\n    import seen_by_the_checker\nelse:\n    import otherwise\n"
        "def function():\n    from sqlalchemy.ext import asyncio\n"
    )

    assert list(imports_at_run_time(ast.parse(source))) == [
        "sqlalchemy.ext.asyncio",
        "otherwise",
        "sqlalchemy.ext",
        "sqlalchemy.ext.asyncio",
    ]


Function = ast.FunctionDef | ast.AsyncFunctionDef
Found = dict[str, list[str]]


@cache
def tree_of(module: Path) -> ast.Module:
    return ast.parse(module.read_text("utf-8"))


def found_in(look: Callable[[ast.Module], Iterator[str]], *, but: Sequence[str]) -> Found:
    """What breaks a law, for each module in which something does."""
    found = {path: list(look(tree_of(path))) for path in MODULES if not is_in(path, *but)}
    return {str(path.relative_to(PACKAGE)): texts for path, texts in found.items() if texts}


def is_in(module: Path, *rooms: str) -> bool:
    """Whether this is one of these modules, or stands in one of these packages."""
    return any(module.is_relative_to(PACKAGE / room) for room in rooms)


def sql_in(tree: ast.Module) -> Iterator[str]:
    """Texts that begin as a statement does, docstrings aside."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node not in docstrings:
            text = node.value
            if isinstance(text, str) and STATEMENT.match(text):
                yield text


def attributes_of_classes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What is assigned in the body of a class, but for names that Python itself reads."""
    for owner in ast.walk(tree):
        for line in owner.body if isinstance(owner, ast.ClassDef) else ():
            for target in line.targets if isinstance(line, ast.Assign) else ():
                if isinstance(target, ast.Name) and not target.id.startswith("__"):
                    yield owner.name, target.id  # type: ignore[attr-defined]  # a ClassDef


def attributes_read(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr


def is_of_library(module: Path, owner: str, name: str) -> bool:
    """Whether a class derives from one of a library, which may read its attributes, or from a
    built-in one whose attribute it replaces."""
    path = ".".join(module.relative_to(PACKAGE.parent).with_suffix("").parts)
    bases = getattr(import_module(path), owner).__bases__
    of_library = (base for base in bases if not base.__module__.startswith(("pgqueue", "abc")))
    return any(base.__module__ != "builtins" or hasattr(base, name) for base in of_library)


def calls_in(tree: ast.Module) -> Iterator[str]:
    return (ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))


def commits_in(tree: ast.Module) -> Iterator[str]:
    return (call for call in calls_in(tree) if call.endswith(".commit"))


def loggers_in(tree: ast.Module) -> Iterator[str]:
    return (call for call in calls_in(tree) if call.endswith("getLogger"))


def async_imports(tree: ast.Module) -> Iterator[str]:
    names = imports_at_run_time(tree)
    return (name for name in names if f"{name}.".startswith("sqlalchemy.ext.asyncio."))


def deletes_what_lacks_a_row(tree: ast.Module) -> Iterator[str]:
    """Functions that build a DELETE and the condition that some row is missing."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            calls = list(calls_in(ast.Module(node.body, [])))
            deletes = {"sa.delete", "delete_unlocked"} & {*calls}
            lacks = any(
                # Of a column, it is no question for rows.
                isinstance(each, ast.UnaryOp)
                and isinstance(each.op, ast.Invert)
                and not isinstance(each.operand, ast.Attribute)
                for each in ast.walk(node)
            )
            lacks = lacks or any(
                call.endswith((".outerjoin", ".scalar_subquery().is_", ".not_in")) for call in calls
            )
            if (
                deletes
                and lacks
                and not {"sees_all", "has_message_or_lease", "is_placed"} & {*calls}
            ):
                yield node.name


def reads_args(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "args" for node in ast.walk(tree))


def imports_at_run_time(node: ast.AST, *, into_functions: bool = True) -> Iterator[str]:
    """The modules a piece of code may import, but for those under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            module = child.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for otherwise in child.orelse:
                yield from imports_at_run_time(ast.Module([otherwise], []))
        elif into_functions or not isinstance(child, Function):
            yield from imports_at_run_time(child, into_functions=into_functions)
