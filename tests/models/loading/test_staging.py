"""A folder takes another's place: whole, or so that it can be tried again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ciar.errors import DataError
from ciar.models.loading.staging import staged


def write(folder: Path, name: str, extra: str) -> None:
    (folder / "config.json").write_text(name)
    (folder / extra).write_text(name)
    (folder / "manifest.json").write_text(json.dumps({"config.json": {}, extra: {}}))


@pytest.mark.parametrize("new", [True, False])
def test_a_stop_while_files_take_their_places_can_be_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: bool
) -> None:
    out = tmp_path / "out"
    if not new:
        with staged(out, 0, force=False) as folder:
            write(folder, "old", "old.bin")
        assert sorted(path.name for path in out.iterdir()) == ["config.json", "manifest.json", "old.bin"]
    replace = Path.replace

    def stopped(path: Path, target: Path) -> Path:
        if path.name == "new.bin":
            raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt), staged(out, 0, force=True) as folder:
        write(folder, "new", "new.bin")
    assert not (out / "config.json").exists()  # nobody takes it for a backbone
    monkeypatch.undo()
    with pytest.raises(DataError, match="Pass --force"), staged(out, 0, force=False):
        pass
    with staged(out, 0, force=True) as folder:
        write(folder, "new", "new.bin")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "manifest.json", "new.bin"]
    assert (out / "config.json").read_text() == "new"


def test_what_is_no_backbone_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    with pytest.raises(DataError, match="something else"), staged(tmp_path, 0, force=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
