"""The file of a benchmark: one JSON line a picture, written as soon as it is made, so that nothing is lost.

The first line says how the run was made. A run goes on where it was left; only rounds (one picture by every
row, in turn) that are whole count, so that what is compared was always measured side by side.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ciar.errors import DataError, InputError

#: (round-trip time in ms, number of the picture, label of the row)
Key = tuple[float, int, str]


@dataclass
class Records:
    """What has been measured.

    Attributes:
        settings: how; nothing of it may differ when a run goes on.
        echoes: by round-trip time, the round trips that were measured, in ms.
        pictures: what each picture cost.
    """

    path: Path
    settings: dict[str, Any]
    echoes: dict[float, list[float]] = field(default_factory=dict)
    pictures: dict[Key, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any]) -> Records:
        """Begins a file, or goes on with one of the same settings.

        Raises:
            InputError: the file is of a run with other settings.
            DataError: the file is damaged, or cannot be written.
        """
        records = cls(path, settings)
        if path.is_file():
            records._read()
        else:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise DataError(f"{path.parent} cannot be made ({error.strerror}).") from error
            records._append({"settings": settings})
        return records

    def _read(self) -> None:
        try:
            *whole, rest = self.path.read_text(encoding="utf-8").split("\n")
            lines: list[dict[str, Any]] = [json.loads(line) for line in whole]
            found = dict(lines[0]["settings"])
            for line in lines[1:]:
                self._take(line)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise DataError(
                f"{self.path} is no file of this benchmark, or damaged ({error}). Choose another --out."
            ) from None
        # As it reads back: tuples are lists, for example.
        asked = json.loads(json.dumps(self.settings))
        changed = sorted(key for key in asked | found if asked.get(key) != found.get(key))
        if changed:
            raise InputError(
                f"{self.path} is of a run with another {' and '.join(changed)}. Choose another --out, or "
                "remove the file."
            )
        if rest:  # a line that was cut off in the middle
            self.path.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")

    def _take(self, line: dict[str, Any]) -> None:
        rtt_ms = float(line["rtt_ms"])
        if "echo_ms" in line:
            self.echoes.setdefault(rtt_ms, []).append(float(line["echo_ms"]))
        else:
            self.pictures[rtt_ms, int(line["picture"]), line["row"]] = line

    def add(self, line: dict[str, Any]) -> None:
        """Adds a line: an ``echo_ms`` of an ``rtt_ms``, or a picture."""
        self._take(line)
        self._append(line)

    def _append(self, line: dict[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:
            raise DataError(f"{self.path} cannot be written ({error.strerror}).") from error

    def rounds(self, rtt_ms: float, labels: Sequence[str]) -> list[int]:
        """Numbers of the pictures that every row has made at a round-trip time, all in one go."""
        found: list[int] = []
        for number in sorted({number for rtt, number, _ in self.pictures if rtt == rtt_ms}):
            made = [self.pictures.get((rtt_ms, number, label)) for label in labels]
            goes = {None if one is None else one["go"] for one in made}
            if len(goes) == 1 and None not in goes:
                found.append(number)
        return found

    def of(self, rtt_ms: float, label: str, rounds: Sequence[int]) -> list[dict[str, Any]]:
        """The pictures of a row."""
        return [self.pictures[rtt_ms, number, label] for number in rounds]
