"""Writes the revision file by which an application's own history upgrades pgqueue's tables."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from pgqueue.errors import SchemaError
from pgqueue.schema.state import SCHEMA_VERSION, installed

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

_OURS = Path(__file__).parents[1] / "migrations"


def write_revision(
    host: Config | Path | str, *, message: str = "add pgqueue", head: str = "head"
) -> Path:
    """Write the next revision of an application's own history.

    The revision upgrades the tables from the version of the last such revision to the newest.

    Args:
        host: The application's Alembic ``Config``, its ``alembic.ini``, its
            ``pyproject.toml`` with a table ``[tool.alembic]``, or its directory of migrations.
        message: The message of the revision.
        head: The revision that it follows.

    Returns:
        The file.

    Raises:
        SchemaError: The history has the newest version already, is pgqueue's own, or has a template
            without a place for the call.
    """
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError

    config = _config_of(Path(host)) if isinstance(host, Path | str) else host
    try:
        scripts = ScriptDirectory.from_config(config)
        path = _write(scripts, config, message=message, head=head)
    except CommandError as error:
        raise SchemaError(f"Alembic wrote no revision: {error}") from error
    # Templates for several databases have one function for each and none for all.
    if "pgqueue.schema.upgrade" not in path.read_text("utf-8"):
        raise SchemaError(
            f"The template of {path} has no place for the call. In the functions for the database "
            f"that holds the jobs, write pgqueue.schema.upgrade(to={SCHEMA_VERSION}) and "
            "pgqueue.schema.downgrade(to=0)."
        )
    return path


def find_host(folder: Path) -> Path | None:
    """Return what configures Alembic in a folder: its ini file, pyproject.toml or migrations."""
    ini, project, migrations = (
        folder / name for name in ("alembic.ini", "pyproject.toml", "migrations")
    )
    if ini.is_file():
        return ini
    if _configures_alembic(project):
        return project
    return migrations if migrations.is_dir() else None


def _configures_alembic(project: Path) -> bool:
    try:
        return "alembic" in tomllib.loads(project.read_text("utf-8")).get("tool", {})
    except FileNotFoundError:
        return False
    except ValueError as error:
        raise SchemaError(f"{project} cannot be read: {error}") from error


def _config_of(path: Path) -> Config:
    """Alembic keeps its ini file beside the directory of migrations, Flask-Migrate inside it."""
    if path.is_file():
        return _config_in(path.absolute().parent, ini=path)
    inside, beside = path / "alembic.ini", path.absolute().parent / "alembic.ini"
    ini = next((ini for ini in (inside, beside) if ini.is_file()), None)
    config = _config_in(path.absolute().parent, ini=ini)
    config.set_main_option("script_location", str(path).replace("%", "%%"))
    return config


def _config_in(folder: Path, *, ini: Path | None) -> Config:
    """Read an ini file and the ``[tool.alembic]`` beside it, which Alembic knows since 1.16."""
    from alembic.config import Config

    project = folder / "pyproject.toml"
    if ini is not None and ini.name == project.name:
        beside = folder / "alembic.ini"
        ini = beside if beside.is_file() else None
    if not _configures_alembic(project):
        return Config(str(ini)) if ini else Config()
    try:
        return Config(str(ini) if ini else None, toml_file=str(project))
    except TypeError as error:
        raise SchemaError(
            f"{project} has a table [tool.alembic], which Alembic reads since version 1.16: update "
            "Alembic, or write an alembic.ini"
        ) from error


def _write(scripts: ScriptDirectory, config: Config, *, message: str, head: str) -> Path:
    from alembic.util import rev_id

    if Path(scripts.dir).resolve() == _OURS.resolve():
        raise SchemaError(
            f"{scripts.dir} is pgqueue's own history. Run this where your application's "
            "alembic.ini is, or name that file."
        )
    sources = [Path(script.path).read_text("utf-8") for script in scripts.walk_revisions()]
    calls = re.findall(r"\bschema\.upgrade\(\s*to=(\d+)", "\n".join(sources))
    base = max(map(int, calls), default=0)
    if base >= SCHEMA_VERSION:
        raise SchemaError(
            f"A revision in {scripts.dir} already calls pgqueue.schema.upgrade(to={base}), and "
            f"{installed()} knows no newer version."
        )
    script = scripts.generate_revision(
        rev_id(),
        message,
        head=head,
        config=config,
        imports="import pgqueue.schema",
        upgrades=f"pgqueue.schema.upgrade(to={SCHEMA_VERSION}, base={base})",
        downgrades=f"pgqueue.schema.downgrade(to={base}, base={SCHEMA_VERSION})",
    )
    assert script is not None  # None is for files that are no revision
    return Path(script.path)
