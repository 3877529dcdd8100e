"""Quality against cost: many pictures of many prompts by several settings, judged against plain AR.

Makes the pictures in batches (decoding.batch), with the same prompts and seeds for every setting, and
judges them with the dual encoder: Frechet distance to the real pictures, retrieval accuracy, both
with paired bootstrap intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ciar.decoding.batch import Batch, BatchPicture
from ciar.decoding.codebook import Codebook
from ciar.decoding.gate import SCORE_NAMES
from ciar.decoding.options import default_settings, law_of
from ciar.decoding.oracle import Oracle
from ciar.decoding.scorer import scoring_of
from ciar.decoding.strategy import get_strategy
from ciar.errors import DataError, InputError
from ciar.evaluation.bootstrap import Estimate, paired_frechet_change, paired_retrieval_difference
from ciar.evaluation.features import caption_features, image_features
from ciar.evaluation.frechet import frechet_distance
from ciar.evaluation.retrieval import retrieval_accuracy
from ciar.intervals.thresholds import ThresholdConfig
from ciar.ledger import Ledger
from ciar.models.bundle import Bundle
from ciar.models.dual_encoder import DualEncoder
from ciar.models.families import for_decoding
from ciar.models.text import StaticTextEncoder, side_by_side
from ciar.models.vq import to_uint8


@dataclass(frozen=True)
class Run:
    """One setting to be judged.

    Attributes:
        label: what tables call it.
        settings: changes to the backbone's settings.
        threshold: the gate; None is the backbone's for the score.
        score: the gate's score; None is the backbone's. ``oracle`` is the true distance to the cloud's
            law, the upper bound of any gate; it needs a threshold.
    """

    label: str
    settings: dict[str, Any]
    threshold: ThresholdConfig | None = None
    score: str | None = None


@dataclass(frozen=True)
class Made:
    """Pictures of one setting.

    Attributes:
        pixels: uint8 [pictures, height, width, 3].
        tokens: int64 [pictures, tokens].
        ledgers: what each cost; a batch has no wire, so there are no bytes and no milliseconds.
    """

    pixels: np.ndarray
    tokens: Tensor
    ledgers: list[Ledger]

    def mean(self, figure: Callable[[Ledger], float]) -> float:
        """Mean of a figure of the ledgers."""
        return float(np.mean([figure(ledger) for ledger in self.ledgers]))


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
        made: the pictures.
    """

    label: str
    frechet: float
    retrieval: float
    made: Made
    frechet_change: Estimate | None = None
    retrieval_change: Estimate | None = None

    @property
    def uploads(self) -> float:
        return self.made.mean(lambda ledger: ledger.upload_share)

    @property
    def passes(self) -> float:
        return self.made.mean(lambda ledger: ledger.cloud_call_share)

    @property
    def rows(self) -> float:
        return self.made.mean(lambda ledger: ledger.token_rows / ledger.tokens)

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


def check_runs(runs: Sequence[Run]) -> None:
    """Checks the names that runs use before hours are spent on the first of them.

    Raises:
        InputError: a strategy or a score is unknown; the message lists the known ones.
    """
    for run in runs:
        get_strategy(run.settings.get("strategy", "base"))
        if run.score == "oracle" and run.threshold is not None:
            continue
        if run.score is not None and run.score not in SCORE_NAMES:
            raise InputError(
                f"There is no score {run.score!r}. The scores are: {', '.join(sorted(SCORE_NAMES))}."
            )


def text_features(bundle: Bundle, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Features of prompts side by side, cropped to the longest.

    Returns:
        features: float32 [prompts, text, caption_dim], left-padded.
        mask: bool [prompts, text].
    """
    return side_by_side([bundle.text.encode(prompt) for prompt in prompts])


def make_pictures(
    bundle: Bundle,
    prompts: Sequence[str],
    run: Run,
    *,
    seed: int = 0,
    batch: int = 64,
    note: Callable[[str], None] | None = None,
) -> Made:
    """Pictures of prompts by one setting; picture i has seed ``seed + i``."""
    defaults = bundle.defaults
    base = default_settings(defaults, "base")
    strategy = get_strategy(run.settings.get("strategy", "base"))
    score = run.score or defaults.score
    threshold = run.threshold or defaults.threshold_for(score)
    scoring = scoring_of(bundle, score, threshold.share)
    device = bundle.device_model if strategy.uses_device else None
    # Rearranged once, not for every batch; but EAGLE's drafter reads the model as it is stored.
    cloud = for_decoding(bundle.model) if strategy.uses_cloud or score == "oracle" else None
    drafted = bundle.model if strategy.uses_eagle else cloud
    codebook = Codebook(bundle.codes)
    pixels: list[np.ndarray] = []
    done: list[BatchPicture] = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        features, mask = text_features(bundle, part)
        settings = [replace(base, **run.settings, seed=seed + start + i) for i in range(len(part))]
        judged = bundle.total - int(settings[0].prefix_rate * bundle.total)
        gates = [threshold.start(judged) for _ in part]
        if score == "oracle":
            assert cloud is not None
            oracle = Oracle(cloud, features, mask, settings[0].guidance, law_of(settings[0]))
            scoring = replace(scoring, oracle=oracle)
        pictures = Batch(
            drafted if strategy.uses_cloud else None,
            device,
            features,
            mask,
            settings,
            strategy,
            list(gates),
            scoring,
            codebook,
            eagle=bundle.eagle if strategy.uses_eagle else None,
        ).run()
        codes = torch.tensor([picture.tokens for picture in pictures])
        pixels.append(bundle.pixels(codes).cpu().numpy())
        done += pictures
        if note is not None:
            note(f"{run.label}: {start + len(part)} of {len(prompts)} pictures")
    tokens = torch.tensor([picture.tokens for picture in done])
    return Made(np.concatenate(pixels), tokens, [picture.ledger for picture in done])


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
        """A judge on the real training pictures of a data set.

        Raises:
            CheckpointError: the dual encoder is missing or damaged.
            DataError: the data set is missing or incomplete.
        """
        from ciar.training.captions import load_captions, plain_caption
        from ciar.training.data.emoji import without_tone

        encoder = DualEncoder.load(folder)
        icons = load_captions(data)
        images = _load_images(data)
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

    Raises:
        InputError: a strategy, a score or a prompt cannot be used.
    """
    return list(judge_each(bundle, the_judge, prompts, names, runs, seed=seed, batch=batch, note=note))


def judge_each(
    bundle: Bundle,
    the_judge: Judge,
    prompts: Sequence[str],
    names: Sequence[str],
    runs: Sequence[Run],
    *,
    seed: int = 0,
    batch: int = 64,
    note: Callable[[str], None] | None = None,
) -> Iterator[Judged]:
    """What :func:`judge` gives, each as soon as it is known."""
    check_runs(runs)
    captions = caption_features(the_judge.encoder, the_judge.text, list(prompts))
    first_features: np.ndarray | None = None
    first_correct: np.ndarray | None = None
    for run in runs:
        made = make_pictures(bundle, prompts, run, seed=seed, batch=batch, note=note)
        features = image_features(the_judge.encoder, made.pixels)
        retrieval = retrieval_accuracy(
            pictures=features,
            own_captions=captions,
            names=names,
            pool=the_judge.pool,
            pool_names=the_judge.pool_names,
        )
        distance = frechet_distance(generated=features, real=the_judge.real).value
        judged = Judged(run.label, distance, float(np.mean(retrieval.correct)), made)
        if first_features is None or first_correct is None:
            first_features, first_correct = features, retrieval.correct
        else:
            judged.frechet_change = paired_frechet_change(
                before=first_features, after=features, real=the_judge.real
            )
            judged.retrieval_change = paired_retrieval_difference(first_correct, retrieval.correct)
        yield judged


def change_cells(row: Judged) -> tuple[str, str]:
    """Changes against the first run for a table, with their intervals: Frechet distance, retrieval."""
    if row.frechet_change is None or row.retrieval_change is None:
        return "", ""
    f, r = row.frechet_change, row.retrieval_change
    return (
        f"{f.value:+.1%} [{f.low:+.1%}, {f.high:+.1%}]",
        f"{r.value:+.1f} [{r.low:+.1f}, {r.high:+.1f}] points",
    )


def markdown(judged: Sequence[Judged]) -> str:
    """The frontier as a Markdown table."""
    lines = [
        "| setting | uploads | passes / T | rows / T | Frechet | change | retrieval | change |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in judged:
        frechet, retrieval = change_cells(row)
        lines.append(
            f"| {row.label} | {row.uploads:.1%} | {row.passes:.1%} | {row.rows:.2f} | {row.frechet:.4f} | "
            f"{frechet} | {row.retrieval:.1%} | {retrieval} |"
        )
    return "\n".join(lines) + "\n"


def evaluation_prompts(
    data: Path, count: int, text: StaticTextEncoder, *, calibration: bool = False
) -> tuple[list[str], list[str]]:
    """Prompts that pictures are judged on: captions of training pictures, none used for calibration.

    Args:
        calibration: those that calibration holds back instead, for whatever is chosen before it is judged.

    Returns:
        ``count`` prompts and the name of each one's thing; they repeat when the data set is smaller.

    Raises:
        DataError: the data set is missing, or calibration leaves no name of it.
    """
    from ciar.training.captions import CaptionBank, indices_of, load_captions, plain_caption
    from ciar.training.data.emoji import without_tone
    from ciar.training.gate import CALIBRATION_PICTURES, calibration_split

    icons = load_captions(data)
    train = indices_of(icons, "train")
    calibrated = calibration_split(CaptionBank(icons, text), train, CALIBRATION_PICTURES)
    held_back = {without_tone(icons[i].name) for i in calibrated}
    usable = [i for i in train.tolist() if (without_tone(icons[i].name) in held_back) == calibration]
    if not usable:
        raise DataError(
            f"{data} has no training picture whose name calibration leaves. Use a larger data set."
        )
    generator = torch.Generator().manual_seed(4321)
    order = torch.randperm(len(usable), generator=generator).tolist()
    rows = [usable[order[i % len(order)]] for i in range(count)]
    prompts = [plain_caption(icons[row], style=i % 3 != 0) for i, row in enumerate(rows)]
    return prompts, [without_tone(icons[row].name) for row in rows]


#: Training names of the first contact sheet: common things, none of them chosen by its result.
SHEET_PROMPTS = (
    "grinning face",
    "crying face",
    "red heart",
    "cat face",
    "dog face",
    "pig face",
    "rocket",
    "red apple",
    "slice of pizza",
    "birthday cake",
    "sunflower",
    "christmas tree",
    "automobile",
    "sailboat",
    "house",
    "umbrella",
    "soccer ball",
    "light bulb",
    "key",
    "crown",
    "ghost",
    "fish",
    "butterfly",
    "rainbow",
)


def draw_sheets(backbone: str, data: Path, out: Path, seed: int) -> list[Path]:
    """Writes the contact sheets of the docs; returns their paths.

    Raises:
        DataError: the data set is missing, incomplete, or has no held-out name.
    """
    from ciar.evaluation.sheets import contact_sheet, pair_sheet
    from ciar.models.bundle import load_bundle
    from ciar.models.vq import from_uint8
    from ciar.training.captions import load_captions, plain_caption

    bundle = load_bundle(backbone)
    icons = load_captions(data)
    images = _load_images(data)
    held = [i for i, icon in enumerate(icons) if icon.split == "held_name"]
    if not held:
        raise DataError(f"{data} has no held-out names to draw. Build the data set anew: ciar train data.")
    chosen = held[:: max(1, len(held) // 24)][:24]
    originals = np.stack([images[i] for i in chosen])
    with torch.inference_mode():
        codes = bundle.vq.encode(from_uint8(torch.from_numpy(originals)))
        decoded = to_uint8(bundle.vq.decode(codes)).numpy()
    captions = [plain_caption(icons[i]) for i in chosen]
    sheets = {
        "reconstruction.png": pair_sheet(
            list(zip(captions, originals, decoded, strict=True)), title="Held-out pictures"
        )
    }
    held_prompts = [plain_caption(icons[i], style=False) for i in chosen]
    for label, prompts in (("training", list(SHEET_PROMPTS)), ("held-out", held_prompts)):
        for strategy in ("base", "ciar"):
            pixels = make_pictures(bundle, prompts, Run(strategy, {"strategy": strategy}), seed=seed).pixels
            sheets[f"{label}-{strategy}.png"] = contact_sheet(
                list(zip(prompts, pixels, strict=True)), title=f"{label} names, {strategy}, seed {seed}"
            )
    for scale in (1.0, 3.0, 6.0):
        run = Run("base", {"strategy": "base", "guidance": scale})
        pixels = make_pictures(bundle, SHEET_PROMPTS[:12], run, seed=seed).pixels
        sheets[f"guidance-{scale:g}.png"] = contact_sheet(
            list(zip(SHEET_PROMPTS[:12], pixels, strict=True)), title=f"guidance {scale:g}"
        )
    for name, sheet in sheets.items():
        sheet.save(out / name, optimize=True)
    return [out / name for name in sheets]


def _load_images(data: Path) -> np.ndarray:
    """The pictures of a data set, uint8 [pictures, height, width, 3], memory-mapped."""
    path = data / "images.npy"
    try:
        images: np.ndarray = np.load(path, mmap_mode="r")
    except FileNotFoundError:
        raise DataError(f"{path} does not exist. Build the data set first: ciar train data.") from None
    return images
