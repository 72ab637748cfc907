import os
import subprocess
import sys
from pathlib import Path

from chaos.folders import PREFIX, server_folder


def test_the_folders_of_killed_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    abandoned, used = (tmp_path / f"{PREFIX}{pid}-x" for pid in (ended.pid, os.getpid()))
    for folder in (abandoned, used):
        (folder / "data").mkdir(parents=True)

    with server_folder(str(tmp_path)) as new:
        assert sorted(tmp_path.iterdir()) == sorted([new, used])

    assert not new.exists()
