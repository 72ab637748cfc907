"""What a release does, up to the upload: `make release`.

A program and no test: it builds the archives, checks them as the package index does, installs the
wheel in a new environment from a folder as its index, and runs the first program of README.md.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from sqlalchemy import create_engine, make_url, text

from pgqueue.embedded import EmbeddedPostgres

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from documents import programs_of  # noqa: E402 - the helpers of the tests are no package


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    with tempfile.TemporaryDirectory(prefix="pgqueue-release-") as folder:
        index, place = Path(folder) / "index", Path(folder) / "environment"
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(index), str(ROOT))
        archives = sorted(index.iterdir())
        run(sys.executable, "-m", "twine", "check", "--strict", *map(str, archives))
        assert_same_modules(archives)
        venv.create(place, with_pip=True)
        python = str(place / "bin" / "python")
        wanted = f"{project['name']}=={project['version']}"
        run(python, "-m", "pip", "install", "--quiet", "--find-links", str(index), wanted)
        run_first_program(python, place)
        run(str(place / "bin" / "pgqueue"), "--version")
        names = ", ".join(archive.name for archive in archives)
    print(f"{names}: built, checked, installed, and the first program of README.md has run.")


def assert_same_modules(archives: list[Path]) -> None:
    """The wheel, which was built from the source archive, has each file of the package.

    The revisions are behind a link; the first program needs them.
    """
    [wheel] = [archive for archive in archives if archive.suffix == ".whl"]
    listed = run(sys.executable, "-m", "zipfile", "--list", str(wheel), quiet=True)
    packed = {line.split()[0] for line in listed.splitlines()}
    tracked = run("git", "-C", str(ROOT), "ls-files", "pgqueue", quiet=True).splitlines()
    missing = {name for name in set(tracked) - packed if not (ROOT / name).is_symlink()}
    assert not missing, f"{wheel.name} lacks {sorted(missing)}"


def run_first_program(python: str, folder: Path) -> None:
    """Run it with the new environment alone, on a PostgreSQL of its own."""
    program = folder / "shop.py"
    program.write_text(next(programs_of(ROOT / "README.md")).source, "utf-8")
    with EmbeddedPostgres() as server:
        said = run(python, str(program), DATABASE_URL=server.url, cwd=folder)
        assert "{'succeeded': 1}" in said, said
        with create_engine(make_url(server.url)).connect() as connection:
            assert connection.scalar(text("SELECT is_paid FROM orders"))


def run(*command: str, quiet: bool = False, cwd: Path = ROOT, **variables: str) -> str:
    """Run a command, which must succeed; returns what it prints."""
    ended = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{ended.stdout}")
    if not quiet:
        print(f"{' '.join(Path(word).name for word in command)}: done")
    return ended.stdout


if __name__ == "__main__":
    main()
