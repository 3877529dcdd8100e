"""Makes a folder's content beside what the folder holds, and puts it in place when it is whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ciar.errors import DataError
from ciar.models.checkpoint import MANIFEST

#: Name of the folder inside that holds what is not whole yet.
STAGING = ".partial"
#: Name of the file that says that files are taking their places, or were stopped at it.
UNFINISHED = ".unfinished"


@contextmanager
def staged(out: Path, needed: int, force: bool) -> Iterator[Path]:
    """A folder to write a backbone into; on leaving it without an error, it takes the place of ``out``'s.

    Until then nothing of ``out`` is touched, and after an error or an interruption nothing is left, so
    that the same can be tried again. A stop while the files take their places, which is a moment, leaves a
    folder that is no backbone, and that ``force`` replaces. Of an older backbone the files go that its
    manifest lists; what else lies there stays.

    Args:
        out: made when it is missing.
        needed: bytes that will be written.
        force: ``out`` may hold an older backbone, or what a stop has left of one.

    Raises:
        DataError: the folder holds something else, cannot be written, or has no room.
    """
    _check(out, force)
    new = not out.exists()
    staging = out / STAGING
    try:
        shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
        staging.mkdir(parents=True)
        _check_room(out, needed)
        yield staging
        _put_in_place(staging, out)
    except OSError as error:
        raise DataError(
            f"{out} cannot be written ({error.strerror or error}). Make room, or choose another folder with "
            "--out."
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if new:
            with suppress(OSError):  # it is not empty where all went well
                out.rmdir()


def _check(out: Path, force: bool) -> None:
    if out.is_file():
        raise DataError(f"{out} is a file. Choose a folder with --out.")
    if not out.is_dir() or not [path for path in out.iterdir() if path.name != STAGING]:
        return
    if not (out / "config.json").is_file() and not (out / UNFINISHED).is_file():
        raise DataError(f"{out} holds something else than a backbone. Choose another folder with --out.")
    if not force:
        raise DataError(f"{out} is not empty. Pass --force to replace what is in it, or choose another.")


def _check_room(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out).free
    if free < needed:
        raise DataError(
            f"The weights take {needed / 1e9:.1f} GB and {out} has {free / 1e9:.1f} GB free. Make room, or "
            "choose another folder with --out."
        )


def _put_in_place(staging: Path, out: Path) -> None:
    old = _listed(out)
    (out / UNFINISHED).touch()
    # Without a config the folder is no backbone, so that nobody takes a mixture for one.
    (out / "config.json").unlink(missing_ok=True)
    fresh = sorted(path.relative_to(staging) for path in staging.rglob("*") if path.is_file())
    for name in old - {path.as_posix() for path in fresh}:
        (out / name).unlink(missing_ok=True)
    for path in sorted(fresh, key=lambda path: path.name == "config.json"):
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (staging / path).replace(out / path)
    (out / UNFINISHED).unlink()


def _listed(folder: Path) -> set[str]:
    """Files of the backbone that a folder holds, by its manifest; none of anything outside."""
    try:
        names = set(json.loads((folder / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError):
        return set()
    inside = folder.resolve()
    return {name for name in names if inside in (folder / name).resolve().parents}
