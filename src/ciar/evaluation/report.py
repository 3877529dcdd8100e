"""Result documents: what was measured, with everything that is needed to measure it again.

A figure without its set-up cannot be reproduced, and most published ones cannot; so a result names
its metric preset, prompts, counts, seeds, weights and code, and two results are compared only when
what they measured is the same. Knows nothing of how the figures were made.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ciar.errors import DataError, InputError, NumericalError
from ciar.evaluation.bootstrap import Estimate
from ciar.version import __version__

#: Version of the document's layout.
SCHEMA = 1


@dataclass(frozen=True)
class MetricPreset:
    """How figures were made. Two results with different presets cannot be compared.

    Attributes:
        name: what reports call it.
        encoder: the network behind the features.
        encoder_digest: SHA-256 of its weights.
        resize: how pictures are brought to the encoder's size.
        crop: what is cut away; "none" when nothing is.
        reference: the real pictures that the metrics look at.
        reference_digest: SHA-256 of them.
        options: every other choice, such as k, the ball rule, or captions to choose among.
    """

    name: str
    encoder: str
    encoder_digest: str
    resize: str
    crop: str
    reference: str
    reference_digest: str
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """One measured figure.

    Attributes:
        value: the figure.
        unit: its unit, such as "share" or "squared distance".
        higher_is_better: which way is good.
        low: lower end of its interval; None without one.
        high: upper end of its interval; None without one.
        level: nominal coverage of the interval; None without one.
    """

    value: float
    unit: str
    higher_is_better: bool
    low: float | None = None
    high: float | None = None
    level: float | None = None

    @classmethod
    def of(cls, estimate: Estimate, unit: str, higher_is_better: bool) -> Figure:
        """A figure with its bootstrap interval."""
        return cls(estimate.value, unit, higher_is_better, estimate.low, estimate.high, estimate.level)


@dataclass(frozen=True)
class Result:
    """What one run measured.

    Attributes:
        title: what the run is called in tables.
        preset: how the figures were made.
        count: pictures that were measured.
        prompts: where the prompts come from.
        prompts_sha256: digest of the prompts, in order.
        seeds: seeds of the pictures, in order, or the rule that gives them.
        settings: settings of the sampler: backbone, strategy, guidance, threshold, top-k, ...
        weights_digest: SHA-256 of the weights that made the pictures.
        figures: measured figures by name.
        not_run: figures that were not measured, each with the command that would.
        notes: sentences that belong beside the figures.
        code_version: version of this package.
    """

    title: str
    preset: MetricPreset
    count: int
    prompts: str
    prompts_sha256: str
    seeds: Sequence[int] | str
    settings: Mapping[str, Any]
    weights_digest: str
    figures: Mapping[str, Figure]
    not_run: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    code_version: str = __version__

    def to_json(self) -> str:
        """One JSON document.

        Raises:
            NumericalError: a figure or setting is NaN or infinite.
        """
        for name, figure in self.figures.items():
            if not math.isfinite(figure.value):
                raise NumericalError(f"{name} is {figure.value}. Measure it again, or list it in not_run.")
        document = {"schema": SCHEMA} | asdict(self)
        try:
            return json.dumps(document, indent=2, allow_nan=False) + "\n"
        except ValueError as error:
            raise NumericalError(f"The result {self.title!r} holds NaN or infinity ({error}).") from None

    def save(self, path: Path) -> None:
        """Writes the document."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Reads what :meth:`to_json` wrote.

        Raises:
            DataError: it is no result document, is of another version, or has unknown entries.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise DataError(f"This is no result document: {error}.") from None
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise DataError(f"This is no result document of version {SCHEMA}. Measure again: ciar eval.")
        del document["schema"]
        preset = _strict(MetricPreset, document.pop("preset", None), "preset")
        figures = document.pop("figures", None)
        if not isinstance(figures, dict):
            raise DataError('A result document must have "figures".')
        document["preset"] = preset
        document["figures"] = {name: _strict(Figure, value, name) for name, value in figures.items()}
        result: Result = _strict(cls, document, "result")
        return result

    @classmethod
    def load(cls, path: Path) -> Result:
        """Reads a result document.

        Raises:
            DataError: the file is missing or is no result document.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read as a result document ({type(error).__name__}).") from None
        return cls.from_json(text)


@dataclass(frozen=True)
class Change:
    """One figure in two results.

    Attributes:
        before: the reference's figure.
        after: the other's figure.
    """

    before: Figure
    after: Figure

    @property
    def absolute(self) -> float:
        """``after - before``, in the figure's unit."""
        return self.after.value - self.before.value

    @property
    def relative(self) -> float | None:
        """``after / before - 1``; None when the reference is 0."""
        return self.after.value / self.before.value - 1.0 if self.before.value else None


@dataclass(frozen=True)
class Comparison:
    """Two results that measured the same thing.

    Attributes:
        before: title of the reference.
        after: title of the other.
        changes: figures that both have, by name.
        differences: what else differs between the runs, a sentence each; it explains the changes.
    """

    before: str
    after: str
    changes: Mapping[str, Change]
    differences: Sequence[str]

    def markdown(self) -> str:
        """A Markdown table, with the differences listed below it."""
        rows = [
            [
                _cell(name),
                _value(change.before),
                _value(change.after),
                f"{change.absolute:+.4g}",
                "" if change.relative is None else f"{change.relative:+.1%}",
                _verdict(change),
            ]
            for name, change in self.changes.items()
        ]
        header = ["figure", _cell(self.before), _cell(self.after), "change", "relative", ""]
        lines = [_table(header, rows), ""]
        lines += [f"- {text}" for text in self.differences] or ["- The runs differ in nothing recorded."]
        return "\n".join(lines) + "\n"


def compare(before: Result, after: Result) -> Comparison:
    """Compares two results figure by figure.

    Raises:
        InputError: they were measured with different presets, prompts or counts, or have no figure in
            common; the message names every difference.
    """
    reasons = [f"{name}: {one!r} and {two!r}" for name, one, two in _different(before.preset, after.preset)]
    if before.prompts_sha256 != after.prompts_sha256:
        reasons.append(f"prompts: {before.prompts!r} and {after.prompts!r} (their digests differ)")
    if before.count != after.count:
        reasons.append(f"pictures: {before.count} and {after.count} (distances are biased by the count)")
    for name in before.figures.keys() & after.figures.keys():
        one, two = before.figures[name], after.figures[name]
        if (one.unit, one.higher_is_better) != (two.unit, two.higher_is_better):
            reasons.append(f"unit of {name}: {one.unit!r} and {two.unit!r}")
    if reasons:
        raise InputError(
            f"{before.title!r} and {after.title!r} did not measure the same thing, so they cannot be "
            f"compared: they differ in {'; '.join(sorted(reasons))}. Measure both with one preset, "
            "one prompt file and one count."
        )
    shared = [name for name in before.figures if name in after.figures]
    if not shared:
        raise InputError(f"{before.title!r} and {after.title!r} have no figure in common.")
    changes = {name: Change(before.figures[name], after.figures[name]) for name in shared}
    return Comparison(before.title, after.title, changes, _run_differences(before, after))


def markdown(results: Sequence[Result]) -> str:
    """A Markdown table, one row a result and one column a figure, with set-up and notes below.

    Results of different presets may stand in one table; each preset has its own columns, so that
    figures which cannot be compared are never in one column.
    """
    if not results:
        raise InputError("A table needs at least one result.")
    columns: dict[tuple[str, str], None] = {}
    several = len({_preset_key(result.preset) for result in results}) > 1
    for result in results:
        for name in [*result.figures, *result.not_run]:
            columns[(name, _preset_key(result.preset))] = None
    labels = {_preset_key(result.preset): result.preset.name for result in results}
    header = ["run", "N"]
    for name, key in columns:
        number = list(labels).index(key) + 1
        header.append(_cell(f"{name} ({labels[key]}, preset {number})" if several else name))
    rows = [
        [_cell(result.title), str(result.count)]
        + [_entry(result, name, key == _preset_key(result.preset)) for name, key in columns]
        for result in results
    ]
    lines = [_table(header, rows), ""]
    for result in results:
        lines += [f"- {_cell(result.title)}: {_cell(sentence)}" for sentence in _set_up(result)]
    return "\n".join(lines) + "\n"


def digest_of_files(paths: Iterable[Path]) -> str:
    """SHA-256 over files' names and bytes, in the order of their names.

    Raises:
        DataError: a file is missing, or there is none.
    """
    ordered = sorted(paths, key=lambda path: path.name)
    if not ordered:
        raise DataError("There is no file to take a digest of.")
    digest = hashlib.sha256()
    for path in ordered:
        try:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        except (FileNotFoundError, IsADirectoryError):
            raise DataError(f"{path} does not exist or is no file, so no digest can be taken.") from None
        digest.update(f"{path.name}\0{content}\n".encode())
    return digest.hexdigest()


def digest_of_prompts(prompts: Iterable[str]) -> str:
    """SHA-256 of prompts in order; no two lists share one by where a prompt ends."""
    return hashlib.sha256(json.dumps(list(prompts), ensure_ascii=False).encode()).hexdigest()


def _strict(kind: Any, values: Any, name: str) -> Any:
    if not isinstance(values, dict):
        raise DataError(f"The entry {name!r} of the result document is missing or malformed.")
    unknown = set(values) - {entry.name for entry in fields(kind)}
    if unknown:
        raise DataError(f"The entry {name!r} of the result document has unknown parts: {sorted(unknown)}.")
    try:
        return kind(**values)
    except TypeError as error:
        raise DataError(f"The entry {name!r} of the result document is incomplete: {error}.") from None


def _different(a: MetricPreset, b: MetricPreset) -> list[tuple[str, Any, Any]]:
    """Name and both values of every part in which two presets differ; options one by one."""
    parts = [part.name for part in fields(MetricPreset) if part.name != "options"]
    pairs = [(name, getattr(a, name), getattr(b, name)) for name in parts]
    pairs += [
        (f"option {key}", a.options.get(key), b.options.get(key))
        for key in sorted(a.options.keys() | b.options.keys())
    ]
    return [(name, one, two) for name, one, two in pairs if one != two]


def _run_differences(before: Result, after: Result) -> list[str]:
    out = []
    for key in sorted(before.settings.keys() | after.settings.keys()):
        one, two = before.settings.get(key), after.settings.get(key)
        if one != two:
            out.append(f"Setting {key}: {one!r} and {two!r}.")
    if before.seeds != after.seeds and list(before.seeds) != list(after.seeds):
        out.append("The seeds differ, so the pictures are no pairs and part of each change is chance.")
    if before.weights_digest != after.weights_digest:
        out.append(f"Weights: {before.weights_digest[:12]} and {after.weights_digest[:12]}.")
    if before.code_version != after.code_version:
        out.append(f"Code version: {before.code_version} and {after.code_version}.")
    return out


def _set_up(result: Result) -> list[str]:
    preset = result.preset
    options = ", ".join(f"{key} {value}" for key, value in sorted(preset.options.items()))
    settings = ", ".join(f"{key} {value}" for key, value in sorted(result.settings.items()))
    out = [
        f"preset {preset.name}: {preset.encoder} ({preset.encoder_digest[:12]}), resize {preset.resize}, "
        f"crop {preset.crop}, reference {preset.reference} ({preset.reference_digest[:12]})"
        + (f", {options}" if options else ""),
        f"{result.count} pictures of {result.prompts} ({result.prompts_sha256[:12]}), weights "
        f"{result.weights_digest[:12]}, ciar {result.code_version}" + (f"; {settings}" if settings else ""),
    ]
    out += [f"{name} was not run; to run it: `{command}`" for name, command in result.not_run.items()]
    return out + list(result.notes)


def _preset_key(preset: MetricPreset) -> str:
    return json.dumps(asdict(preset), sort_keys=True)


def _entry(result: Result, name: str, same_preset: bool) -> str:
    if not same_preset:
        return ""
    if name in result.figures:
        return _value(result.figures[name])
    return "not run" if name in result.not_run else ""


def _value(figure: Figure) -> str:
    text = f"{figure.value:.4g}"
    if figure.low is not None and figure.high is not None:
        text += f" [{figure.low:.4g}, {figure.high:.4g}]"
    return text


def _verdict(change: Change) -> str:
    if change.absolute == 0:
        return "same"
    return "better" if (change.absolute > 0) == change.before.higher_is_better else "worse"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(text: str) -> str:
    """A text that cannot break a table or a list."""
    return " ".join(text.replace("|", "\\|").split())
