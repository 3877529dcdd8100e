"""The built package, away from the source: it has its data, and runs from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_wheel_runs_outside_the_repository(tmp_path: Path) -> None:
    """A wheel that lacked its data files has reached users of other projects; see ``ciar doctor``."""
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=240)
    wheel = next(tmp_path.glob("ciar-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    source = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src/ciar").rglob("*") if p.is_file()}
    assert {name for name in source if "__pycache__" not in name} <= names
    assert any(name.endswith("licenses/NOTICE") for name in names)
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import ciar; print(ciar.__file__); "
    code += "from ciar.cli.main import main; sys.exit(main(sys.argv[1:]))"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for words in (["doctor"], ["generate", "a smiling cat", "--seed", "7", "--strategy", "base"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        assert done.stdout.splitlines()[0].startswith(str(tmp_path / "site"))
    assert (tmp_path / "ciar-a-smiling-cat-7.png").stat().st_size > 100
