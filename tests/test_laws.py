"""The rules of the house that no linter knows.

The floors themselves are contracts of import-linter, in pyproject.toml; it cannot name a
subpackage of an external package, and measures no function.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pgqueue

PACKAGE = Path(pgqueue.__file__).parent
ASYNC_DOOR = PACKAGE / "sessions" / "async_sessions.py"

DOORS = ("cli", "demo", "embedded", "flask")
"""Programs of their own: they open sessions, commit them, and show SQL to their users."""
STATEMENT = re.compile(
    r"\s*(?:SELECT|INSERT|UPDATE|DELETE|SET|RESET|BEGIN|COMMIT|SAVEPOINT|RELEASE|ROLLBACK|LISTEN"
    r"|NOTIFY|LOCK|DO|WITH|CREATE|ALTER|DROP|GRANT|REVOKE|TRUNCATE)\s+[\w{$(*]"
)

CARRIERS = ("connections", "execution", "sessions", "unit_of_work", "worker")
"""Between the enqueue of a job and its handler; most of them do not look at its arguments."""
SCHEDULER = "worker/scheduler.py"
"""Enqueues with the arguments of a schedule."""

LONGEST_FUNCTION = 60
"""Lines that hold code: neither the docstring, nor comments, nor empty lines, nor decorators."""

# The migrations are reached by a link, and are Alembic's to import.
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "migrations" not in path.parts)
EVERY_MODULE = pytest.mark.parametrize(
    "module", MODULES, ids=[str(path.relative_to(PACKAGE)) for path in MODULES]
)


@EVERY_MODULE
def test_only_the_async_door_imports_the_asyncio_of_sqlalchemy(module: Path) -> None:
    imported = set(imports_at_run_time(tree_of(module)))

    uses_asyncio = any(f"{name}.".startswith("sqlalchemy.ext.asyncio.") for name in imported)

    assert not uses_asyncio or module == ASYNC_DOOR


def test_the_async_door_imports_the_asyncio_of_sqlalchemy_only_when_it_is_used() -> None:
    """SQLAlchemy 2.1 installs greenlet only with an extra: an import at the top would need it."""
    at_import = set(imports_at_run_time(tree_of(ASYNC_DOOR), into_functions=False))

    assert not any(name.startswith("sqlalchemy.ext") for name in at_import)


@EVERY_MODULE
def test_no_module_is_named_after_the_standard_library(module: Path) -> None:
    name = module.parent.name if module.name == "__init__.py" else module.stem

    assert name == "__main__" or name not in sys.stdlib_module_names


@EVERY_MODULE
def test_no_function_is_much_longer_than_a_screen(module: Path) -> None:
    source = module.read_text("utf-8")

    lengths = {
        f"{function.name}, line {function.lineno}": len(code_lines(function, source))
        for function in functions_of(ast.parse(source))
    }

    assert {name: size for name, size in lengths.items() if size > LONGEST_FUNCTION} == {}


@EVERY_MODULE
def test_statements_are_written_only_in_their_package(module: Path) -> None:
    """But for the DDL and the grants of the schema."""
    texts = set(sql_in(tree_of(module)))

    assert not texts or is_in(module, "statements", "schema", *DOORS), texts


@EVERY_MODULE
def test_only_the_unit_of_work_and_the_connections_commit(module: Path) -> None:
    commits = [call for call in calls_in(tree_of(module)) if call.endswith(".commit")]

    assert not commits or is_in(module, "unit_of_work", "connections", *DOORS), commits


def test_the_arguments_of_a_job_cross_twelve_files_at_most() -> None:
    """The page lists the files; the code between them and around them carries jobs as a whole."""
    page = (PACKAGE.parent / "docs" / "explanation" / "architecture.md").read_text("utf-8")
    way = page.partition("## A job's way through the code")[2]
    listed = re.findall(r"^\d+\. `([\w/]+\.py)`", way, re.MULTILINE)
    carrying = [module for module in MODULES if is_in(module, *CARRIERS)]

    looking = {
        str(module.relative_to(PACKAGE)) for module in carrying if reads_args(tree_of(module))
    }

    assert 1 <= len(listed) <= 12
    assert [name for name in listed if not (PACKAGE / name).is_file()] == []
    assert looking - set(listed) == {SCHEDULER}


def test_what_the_laws_look_for_is_found() -> None:
    tree = ast.parse(
        '"""SET nothing: a docstring."""\n'
        'a = f"SET LOCAL {name} = 1"\nb = "Set the table"\nconnection.commit()\n'
    )

    assert list(sql_in(tree)) == ["SET LOCAL "]
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


def test_docstrings_comments_and_empty_lines_are_no_code() -> None:
    docstring = '    """One.\n\n    Two.\n    """\n\n'
    source = f"def f(\n    a: int,\n) -> int:\n{docstring}    # why\n    return a\n"
    (function,) = functions_of(ast.parse(source))

    assert code_lines(function, source) == {1, 2, 3, 10}


Function = ast.FunctionDef | ast.AsyncFunctionDef


def tree_of(module: Path) -> ast.Module:
    return ast.parse(module.read_text("utf-8"))


def is_in(module: Path, *rooms: str) -> bool:
    return module.relative_to(PACKAGE).with_suffix("").parts[0] in rooms


def sql_in(tree: ast.Module) -> Iterator[str]:
    """Texts that begin as a statement does, docstrings aside."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node not in docstrings:
            text = node.value
            if isinstance(text, str) and STATEMENT.match(text):
                yield text


def calls_in(tree: ast.Module) -> Iterator[str]:
    return (ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))


def reads_args(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "args" for node in ast.walk(tree))


def functions_of(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


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


def code_lines(function: Function, source: str) -> set[int]:
    """The numbers of the lines that count."""
    lines = source.splitlines()
    assert function.end_lineno is not None
    counted = set(range(function.lineno, function.end_lineno + 1))
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        counted -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return {number for number in counted if lines[number - 1].strip().split("#")[0]}
