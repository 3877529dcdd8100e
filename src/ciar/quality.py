"""Quality against cost: many pictures of many prompts by several settings, judged against plain AR.

Makes the pictures in batches (decoding.batch), with the same prompts and seeds for every setting, and
judges them with the dual encoder: Frechet distance to the real pictures, retrieval accuracy, both
with paired bootstrap intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ciar.decoding.batch import Batch
from ciar.decoding.strategy import get_strategy
from ciar.evaluation.bootstrap import Estimate, paired_frechet_change, paired_retrieval_difference
from ciar.evaluation.features import caption_features, image_features
from ciar.evaluation.frechet import frechet_distance
from ciar.evaluation.retrieval import retrieval_accuracy
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.bundle import Bundle
from ciar.models.dual_encoder import DualEncoder
from ciar.models.text import StaticTextEncoder
from ciar.models.vq import to_uint8
from ciar.protocol.messages import Settings


@dataclass(frozen=True)
class Run:
    """One setting to be judged.

    Attributes:
        label: what tables call it.
        settings: changes to the backbone's settings.
        threshold: the gate; None is the backbone's.
        score: the gate's score; None is the backbone's.
    """

    label: str
    settings: dict[str, Any]
    threshold: ThresholdConfig | None = None
    score: str | None = None


@dataclass
class Judged:
    """What one setting cost and how good its pictures are.

    Attributes:
        label: what tables call it.
        uploads: mean share of tokens that the cloud was asked about.
        passes: mean cloud passes a token.
        rows: mean token rows a token.
        frechet: Frechet distance to the real pictures.
        retrieval: top-1 accuracy among 100 captions.
        frechet_change: relative change against the first run, with its interval.
        retrieval_change: change against the first run in points, with its interval.
        pixels: uint8 [pictures, height, width, 3].
    """

    label: str
    uploads: float
    passes: float
    rows: float
    frechet: float
    retrieval: float
    frechet_change: Estimate | None = None
    retrieval_change: Estimate | None = None
    pixels: np.ndarray = field(default_factory=lambda: np.empty(0))

    def to_dict(self) -> dict[str, Any]:
        """Every figure; intervals as [value, low, high]."""
        out: dict[str, Any] = {
            "label": self.label,
            "uploads": self.uploads,
            "passes_per_token": self.passes,
            "rows_per_token": self.rows,
            "frechet": self.frechet,
            "retrieval": self.retrieval,
        }
        for name in ("frechet_change", "retrieval_change"):
            estimate = getattr(self, name)
            out[name] = None if estimate is None else [estimate.value, estimate.low, estimate.high]
        return out


def make_pictures(
    bundle: Bundle,
    prompts: Sequence[str],
    run: Run,
    *,
    seed: int = 0,
    batch: int = 64,
    note: Callable[[str], None] | None = None,
) -> tuple[np.ndarray, dict[str, float]]:
    """Pictures of prompts by one setting; picture i has seed ``seed + i``.

    Returns:
        uint8 [pictures, height, width, 3], and mean uploads, passes and rows a token.
    """
    defaults = bundle.defaults
    base = Settings(
        strategy="base",
        guidance=defaults.guidance,
        temperature=defaults.temperature,
        top_k=defaults.top_k,
        top_p=defaults.top_p,
        prefix_rate=defaults.prefix_rate,
        window=defaults.window,
        injection=defaults.injection,
    )
    strategy = get_strategy(run.settings.get("strategy", "base"))
    threshold = run.threshold or defaults.threshold
    device = bundle.device_model if strategy.uses_device else None
    pixels: list[np.ndarray] = []
    sums = {"uploads": 0.0, "passes": 0.0, "rows": 0.0}
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        texts = [bundle.text.encode(prompt) for prompt in part]
        longest = max(int(t.mask.sum()) for t in texts)
        features = torch.stack([t.features[-longest:] for t in texts])
        mask = torch.stack([t.mask[-longest:] for t in texts])
        settings = [replace(base, **run.settings, seed=seed + start + i) for i in range(len(part))]
        judged = bundle.total - int(settings[0].prefix_rate * bundle.total)
        gates = [threshold.start(judged) for _ in part]
        pictures = Batch(
            bundle.gpt if strategy.uses_cloud else None,
            device,
            features,
            mask,
            settings,
            strategy,
            list(gates),
            run.score or defaults.score,
        ).run()
        for picture in pictures:
            sums["uploads"] += picture.ledger.upload_share
            sums["passes"] += picture.ledger.cloud_call_share
            sums["rows"] += picture.ledger.token_rows / picture.ledger.tokens
        with torch.inference_mode():
            codes = torch.tensor([picture.tokens for picture in pictures])
            pixels.append(to_uint8(bundle.vq.decode(codes)).numpy())
        if note is not None:
            note(f"{run.label}: {start + len(part)} of {len(prompts)} pictures")
    return np.concatenate(pixels), {name: total / len(prompts) for name, total in sums.items()}


@dataclass
class Judge:
    """The dual encoder with what it compares to.

    Args:
        encoder: the dual encoder.
        text: its text encoder.
        real: features of the real pictures [pictures, dim].
        pool: features of the captions that distractors are drawn from.
        pool_names: name of each of them.
    """

    encoder: DualEncoder
    text: StaticTextEncoder
    real: np.ndarray
    pool: np.ndarray
    pool_names: list[str]

    @classmethod
    def from_data(cls, folder: Path, text: StaticTextEncoder, data: Path) -> Judge:
        """A judge on the real training pictures of a data set."""
        from ciar.training.captions import load_captions, plain_caption
        from ciar.training.data.emoji import without_tone

        encoder = DualEncoder.load(folder)
        icons = load_captions(data)
        images = np.load(data / "images.npy", mmap_mode="r")
        rows = [i for i, icon in enumerate(icons) if icon.split == "train"]
        real = image_features(encoder, np.ascontiguousarray(images[rows]))
        by_name = {without_tone(icons[i].name): plain_caption(icons[i], style=False) for i in rows}
        pool = caption_features(encoder, text, list(by_name.values()))
        return cls(encoder, text, real, pool, list(by_name))


def judge(
    bundle: Bundle,
    the_judge: Judge,
    prompts: Sequence[str],
    names: Sequence[str],
    runs: Sequence[Run],
    *,
    seed: int = 0,
    batch: int = 64,
    note: Callable[[str], None] | None = None,
) -> list[Judged]:
    """Judges several settings on the same prompts and seeds; the first is the yard-stick.

    Args:
        prompts: what to draw.
        names: the name of each prompt's thing; captions of the same name are no distractors.
        runs: the settings, plain AR first.
    """
    captions = caption_features(the_judge.encoder, the_judge.text, list(prompts))
    out: list[Judged] = []
    first_features: np.ndarray | None = None
    first_correct: np.ndarray | None = None
    for run in runs:
        pixels, cost = make_pictures(bundle, prompts, run, seed=seed, batch=batch, note=note)
        features = image_features(the_judge.encoder, pixels)
        retrieval = retrieval_accuracy(
            pictures=features,
            own_captions=captions,
            names=names,
            pool=the_judge.pool,
            pool_names=the_judge.pool_names,
        )
        judged = Judged(
            run.label,
            cost["uploads"],
            cost["passes"],
            cost["rows"],
            frechet_distance(generated=features, real=the_judge.real).value,
            float(np.mean(retrieval.correct)),
            pixels=pixels,
        )
        if first_features is None or first_correct is None:
            first_features, first_correct = features, retrieval.correct
        else:
            judged.frechet_change = paired_frechet_change(
                before=first_features, after=features, real=the_judge.real
            )
            judged.retrieval_change = paired_retrieval_difference(first_correct, retrieval.correct)
        out.append(judged)
    return out


def markdown(judged: Sequence[Judged]) -> str:
    """The frontier as a Markdown table."""
    lines = [
        "| setting | uploads | passes / T | rows / T | Frechet | change | retrieval | change |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in judged:
        frechet = retrieval = ""
        if row.frechet_change is not None and row.retrieval_change is not None:
            f, r = row.frechet_change, row.retrieval_change
            frechet = f"{f.value:+.1%} [{f.low:+.1%}, {f.high:+.1%}]"
            retrieval = f"{r.value:+.1f} [{r.low:+.1f}, {r.high:+.1f}] points"
        lines.append(
            f"| {row.label} | {row.uploads:.1%} | {row.passes:.1%} | {row.rows:.2f} | {row.frechet:.4f} | "
            f"{frechet} | {row.retrieval:.1%} | {retrieval} |"
        )
    return "\n".join(lines) + "\n"
