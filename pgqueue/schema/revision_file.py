"""Writes the revision file by which an application's own history upgrades pgqueue's tables."""

from __future__ import annotations

import re
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
        host: The application's Alembic ``Config``, its ``alembic.ini``, or its directory of
            migrations.
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


def _config_of(path: Path) -> Config:
    """Alembic keeps its ini file beside the directory of migrations, Flask-Migrate inside it."""
    from alembic.config import Config

    if path.is_file():
        return Config(str(path))
    inside, beside = path / "alembic.ini", path.absolute().parent / "alembic.ini"
    ini = next((ini for ini in (inside, beside) if ini.is_file()), None)
    config = Config(str(ini)) if ini else Config()
    config.set_main_option("script_location", str(path).replace("%", "%%"))
    return config


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
