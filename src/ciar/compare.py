"""Every strategy side by side: quality, cost, wire and speed on the same prompts, seeds and weights.

Quality and passes come from many pictures in batches (``quality``), bytes, round trips and
milliseconds from a few pictures that take the whole way, message by message (``pipeline``). Nothing here
knows a strategy: a new one appears in the table by being registered.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ciar.decoding.noise import PictureNoise
from ciar.decoding.options import default_settings, law_of
from ciar.decoding.sampling import slack, to_law
from ciar.decoding.strategy import all_strategies, get_strategy
from ciar.errors import InputError
from ciar.evaluation.bootstrap import Estimate, mean_estimate, statistic_estimate
from ciar.intervals.gates import gate_named
from ciar.intervals.thresholds import ThresholdConfig
from ciar.ledger import Ledger
from ciar.models.bundle import Bundle
from ciar.models.families import for_decoding
from ciar.pipeline import Pipeline, check_settings
from ciar.protocol.messages import Settings, option_value
from ciar.quality import Judge, Judged, Run, change_cells, judge, text_features
from ciar.training.teacher import guided_parts

#: Settings that a row may change beside the strategy's own options, with their types.
_SETTINGS: dict[str, Callable[[str], Any]] = {
    "guidance": float,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "prefix_rate": float,
    "window": int,
    "action": str,
    "injection": lambda text: {"true": True, "false": False}[text],
}


@dataclass(frozen=True)
class Row:
    """One setting, measured.

    Attributes:
        judged: its pictures, their quality and their passes.
        exact: whether its law is declared to be the cloud's.
        slack: mean slack of the pictures' tokens under the cloud's law, in nats, with its interval; tokens
            outside the law's support are left out of it.
        outside: share of the tokens outside the law's support.
        same: share of the pictures whose tokens are those of the first row.
        lone: ledgers of the pictures that took the whole way.
    """

    judged: Judged
    exact: bool
    slack: Estimate
    outside: float
    same: float
    lone: list[Ledger]

    def median(self, figure: Callable[[Ledger], float]) -> float:
        """Median of a figure of the lone pictures."""
        return statistics.median(figure(ledger) for ledger in self.lone)

    def spread(self, figure: Callable[[Ledger], float]) -> Estimate:
        """Mean of a figure of the judged pictures, with its interval."""
        return mean_estimate([figure(ledger) for ledger in self.judged.made.ledgers])

    def speed_up(self, first: Row) -> tuple[float, float, float]:
        """Median time of ``first`` by one's own: the figure, and its interval over the timed pictures.

        One picture has no interval, and both ends are the figure.
        """
        times = [np.array([_total_ms(ledger) for ledger in row.lone]) for row in (first, self)]

        def figure(counts: NDArray[np.float64]) -> float:
            own = [float(np.median(np.repeat(one, counts.astype(int)))) for one in times]
            return own[0] / own[1]

        count = len(self.lone)
        if count < 2:
            value = figure(np.ones(count))
            return value, value, value
        found = statistic_estimate(figure, count)
        return found.value, found.low, found.high

    def to_dict(self, first: Row) -> dict[str, Any]:
        """Every figure, speed relative to ``first``; intervals as [value, low, high]."""
        made = self.judged.made
        speed_up = self.speed_up(first)
        return self.judged.to_dict() | {
            "exact": self.exact,
            "speed_up": speed_up[0],
            "total_ms": self.median(_total_ms),
            "accept_length": made.mean(lambda ledger: ledger.accept_length),
            "intervals": {
                "speed_up": list(speed_up),
                "passes_per_token": _three(self.spread(lambda ledger: ledger.cloud_call_share)),
                "rows_per_token": _three(self.spread(lambda ledger: ledger.token_rows / ledger.tokens)),
                "uploads": _three(self.spread(lambda ledger: ledger.upload_share)),
                "accept_length": _three(self.spread(lambda ledger: ledger.accept_length)),
            },
            "device_steps_per_token": made.mean(lambda ledger: ledger.device_steps / ledger.tokens),
            "round_trips": self.median(lambda ledger: ledger.round_trips),
            "critical_round_trips": self.median(lambda ledger: ledger.critical_round_trips),
            "bytes_up": self.median(lambda ledger: ledger.bytes_up),
            "bytes_down": self.median(lambda ledger: ledger.bytes_down),
            "slack": _three(self.slack),
            "outside": self.outside,
            "same_pictures": self.same,
        }


def parse_run(text: str) -> Run:
    """A row of the table from its description, such as ``slack:allowance=2,window=32``.

    Behind the strategy's name come settings and options of the strategy, and ``score`` and ``share``
    for its gate.

    Raises:
        InputError: it cannot be read, or the strategy or an option is unknown.
    """
    name, _, rest = text.strip().partition(":")
    settings: dict[str, Any] = {"strategy": name}
    options: list[tuple[str, Any]] = []
    gate: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"{part!r} in {text!r} is no setting. Write it as name=value.")
        try:
            if key in ("score", "share"):
                gate[key] = value
            elif key in _SETTINGS:
                settings[key] = _SETTINGS[key](value)
            else:
                options.append((key, option_value(value)))
        except (ValueError, KeyError):
            raise InputError(f"{value!r} is no value for {key} in {text!r}.") from None
    if options:
        settings["options"] = tuple(options)
    check_settings(Settings(**settings))
    threshold = None
    if "share" in gate:
        try:
            threshold = ThresholdConfig(kind="budget", share=float(gate["share"]))
        except ValueError:
            raise InputError(
                f"{gate['share']!r} is no share in {text!r}; it is a number from 0 to 1."
            ) from None
    if "score" in gate:
        gate_named(gate["score"])  # the oracle is none: it cannot take the whole way
    return Run(text.strip(), settings, threshold, gate.get("score"))


def runs_of(text: str, bundle: Bundle | None = None, tuned: Mapping[str, str] | None = None) -> list[Run]:
    """Rows of a list such as ``base ciar slack:allowance=2``; ``all`` stands for every strategy.

    Plain AR always comes first: it is what the others are compared to.

    Args:
        bundle: where given, ``all`` leaves out the strategies whose drafter it does not hold.
        tuned: by strategy, the row that stands for its name alone.

    Raises:
        InputError: a row cannot be read, or comes twice.
    """
    labels: list[str] = []
    for part in text.split():
        labels += usable(bundle) if part == "all" else [part]
    labels = [(tuned or {}).get(label, label) for label in labels]
    return [parse_run(label) for label in dict.fromkeys(["base", *labels])]


def usable(bundle: Bundle | None) -> list[str]:
    """Names of the strategies that a backbone has the models for; None is one that has all."""
    eagle = bundle is None or bundle.has_eagle
    return [one.name for one in all_strategies() if eagle or not one.uses_eagle]


def compare(
    bundle: Bundle,
    the_judge: Judge,
    prompts: Sequence[str],
    names: Sequence[str],
    runs: Sequence[Run],
    *,
    seed: int = 0,
    batch: int = 64,
    timed: int = 4,
    note: Callable[[str], None] | None = None,
) -> list[Row]:
    """Measures several settings on the same prompts and seeds; the first is the yard-stick.

    Args:
        prompts, names: as for :func:`ciar.quality.judge`.
        timed: pictures of each setting that take the whole way one by one, the settings in turn.

    Raises:
        InputError: a strategy, an option or a prompt cannot be used.
    """
    judged = judge(bundle, the_judge, prompts, names, runs, seed=seed, batch=batch, note=note)
    lone = _lone_ledgers(bundle, prompts[: max(1, timed)], runs, seed)
    first = judged[0].made.tokens
    rows = []
    for run, one, ledgers in zip(runs, judged, lone, strict=True):
        settings = replace(default_settings(bundle.defaults, "base"), **run.settings, seed=seed)
        gaps, outside = mean_slacks(bundle, prompts, one.made.tokens, settings, batch)
        same = float((one.made.tokens == first).all(dim=1).float().mean())
        exact = get_strategy(settings.strategy).exact
        rows.append(Row(one, exact, mean_estimate(gaps), outside, same, ledgers))
    return rows


def _lone_ledgers(
    bundle: Bundle, prompts: Sequence[str], runs: Sequence[Run], seed: int
) -> list[list[Ledger]]:
    """Ledgers [settings][pictures] of pictures made one by one, the settings in turn."""
    pipe = Pipeline(bundle)
    out: list[list[Ledger]] = [[] for _ in runs]
    for i, prompt in enumerate([prompts[0], *prompts]):
        for ledgers, run in zip(out, runs, strict=True):
            asked = dict(run.settings)
            if "guidance" in asked:
                asked["guidance_scale"] = asked.pop("guidance")
            asked["options"] = dict(asked.get("options", ()))
            done = pipe(prompt, seed=seed + max(0, i - 1), score=run.score, threshold=run.threshold, **asked)
            if i:  # the first round warms up
                ledgers += done.ledgers
    return out


@torch.inference_mode()
def mean_slacks(
    bundle: Bundle, prompts: Sequence[str], tokens: Tensor, settings: Settings, batch: int = 64
) -> tuple[list[float], float]:
    """How far finished pictures are from what the cloud would have chosen in their place.

    Args:
        tokens: int64 [pictures, tokens]; picture i has seed ``settings.seed + i``.

    Returns:
        The mean slack of each picture's tokens in nats, and the share of all tokens outside the law's
        support, whose slack is infinite and not counted.
    """
    law, cloud = law_of(settings), for_decoding(bundle.model)
    total, vocab = bundle.total, bundle.gpt_config.vocab_size
    out: list[float] = []
    outside = 0
    for start in range(0, len(tokens), batch):
        part = tokens[start : start + batch]
        features, mask = text_features(bundle, prompts[start : start + batch])
        seeds = range(settings.seed + start, settings.seed + start + len(part))
        noises = [PictureNoise(seed, 0, total, vocab, bundle.device) for seed in seeds]
        gaps: list[list[Tensor]] = [[] for _ in noises]
        for first, logits in guided_parts(cloud, features, mask, part, settings.guidance):
            rows = part[:, first : first + logits.shape[1]].to(logits.device)
            for own, noise, row, gap in zip(logits, noises, rows, gaps, strict=True):
                gap.append(slack(to_law(own, law), noise.gumbel(first, len(row)), row))
        for gap in gaps:
            found = torch.cat(gap)
            counted = found[found.isfinite()]
            outside += len(found) - len(counted)
            out.append(float(counted.mean()) if len(counted) else 0.0)
    return out, outside / tokens.numel()


def markdown(rows: Sequence[Row]) -> str:
    """The table for people."""
    head = (
        "setting", "law", "speed-up", "passes / T", "rows / T", "uploads", "accept length", "round trips",
        "bytes up", "bytes down", "Frechet", "change", "retrieval", "change", "slack", "same picture",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        figures = row.to_dict(rows[0])
        judged = row.judged
        change = change_cells(judged)
        cells = (
            judged.label,
            "exact" if row.exact else "relaxed",
            _cell(figures["intervals"]["speed_up"]),
            f"{judged.passes:.1%}",
            f"{judged.rows:.2f}",
            f"{judged.uploads:.1%}",
            _cell(figures["intervals"]["accept_length"]),
            f"{figures['round_trips']:.0f}",
            f"{figures['bytes_up']:.0f}",
            f"{figures['bytes_down']:.0f}",
            f"{judged.frechet:.4f}",
            change[0],
            f"{judged.retrieval:.1%}",
            change[1],
            _cell(figures["slack"]),
            f"{row.same:.0%}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _three(estimate: Estimate) -> list[float]:
    return [estimate.value, estimate.low, estimate.high]


def _cell(three: Sequence[float]) -> str:
    value, low, high = three
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _total_ms(ledger: Ledger) -> float:
    return ledger.total_ms
