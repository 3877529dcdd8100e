"""Measures every score on held-out pictures and calibrates the gate that ships.

Two questions are asked of a score, position by position, on real held-out pictures: does it tell where
the cloud would decide otherwise under the same noise (AUROC), and how far the device's law is from the
cloud's on the tokens that it keeps (mean total variation of the 70 % with the lowest score). The
threshold is then set on pictures made by the method itself, from prompts kept apart for calibration.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ciar.decoding.gate import LAW_SCORES, SCORE_NAMES, TopLogits, gate_score, top_logits
from ciar.decoding.oracle import distance
from ciar.decoding.sampling import SamplingLaw, choose, to_law
from ciar.decoding.scorer import Reading, Scorer, Scoring, make_scorer
from ciar.intervals.calibration import auroc, bootstrap, kept_mean
from ciar.intervals.gates import CONTENT_BLIND
from ciar.intervals.learned import LearnedGate
from ciar.models.checkpoint import save_tensors
from ciar.models.device import DeviceModel
from ciar.protocol.messages import Settings
from ciar.training.captions import CaptionBank
from ciar.training.distil import Inputs, load_device, load_inputs
from ciar.training.gate_head import examples, fit_gate
from ciar.training.gate_thresholds import calibrate_thresholds
from ciar.training.teacher import guided_logits

#: Share of the tokens kept when laws are compared.
KEEP = 0.7
#: Prompts that the threshold is calibrated on; evaluation leaves their names out.
CALIBRATION_PICTURES = 64


@dataclass
class GateRecords:
    """What was measured at each position.

    Attributes:
        scores: by name, float [pictures, tokens].
        differs: bool [pictures, tokens]; the cloud's choice is another under the same noise.
        tv: float [pictures, tokens] total variation between the laws.
        greedy: bool [pictures, tokens]; same most likely code.
    """

    scores: dict[str, np.ndarray]
    differs: np.ndarray
    tv: np.ndarray
    greedy: np.ndarray


@torch.inference_mode()
def record(
    inputs: Inputs,
    device: DeviceModel,
    rows: Tensor,
    *,
    guidance: float,
    law: SamplingLaw,
    seed: int = 0,
    batch: int = 8,
    gates: Sequence[Scoring] | None = None,
) -> GateRecords:
    """Teacher-forced scores, disagreements and total variations on real pictures.

    Args:
        rows: int64 [pictures] numbers of held-out pictures.
        gates: scores to record; None is all that need no training.
    """
    gates = untrained_gates() if gates is None else gates
    names = [scoring.name for scoring in gates]
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, list[Tensor]] = {name: [] for name in (*names, "differs", "tv", "greedy")}
    for part in rows.split(batch):
        codes = inputs.codes[part]
        features, mask = inputs.captions.mixed(part)
        cloud = guided_logits(inputs.cloud, features, mask, codes, guidance)
        hidden = device.train_hidden(features, mask, codes[:, :-1])
        centre = device.head.centre_logits(hidden)
        cloud_law = to_law(cloud, law, what="the cloud model")
        device_law = to_law(centre, law, what="the device model")
        noise = -torch.empty_like(centre).exponential_(generator=generator).log()
        proposals = choose(device_law, noise)
        top = top_logits(centre)
        radius = device.head.radius_at(hidden, top.indices)
        for scoring in gates:
            if scoring.name in LAW_SCORES:
                scores = gate_score(scoring.name, top, radius)
            else:
                scorer = make_scorer(scoring, device, [(seed, int(i)) for i in part])
                scores = scores_along(scorer, codes, hidden, centre, top, proposals)
            out[scoring.name].append(scores)
        out["differs"].append(choose(cloud_law, noise) != proposals)
        out["tv"].append(distance(cloud, centre, law))
        out["greedy"].append(cloud.argmax(-1) == centre.argmax(-1))
    joined = {name: torch.cat(parts).numpy() for name, parts in out.items()}
    return GateRecords(
        {name: joined[name] for name in names}, joined["differs"], joined["tv"], joined["greedy"]
    )


def untrained_gates() -> list[Scoring]:
    """Every gate that needs nothing but the device model."""
    return [Scoring(name) for name in SCORE_NAMES if name != "learned"]


def scores_along(
    scorer: Scorer, codes: Tensor, hidden: Tensor, centre: Tensor, top: TopLogits, proposals: Tensor
) -> Tensor:
    """Scores of whole pictures, position by position: float32 [pictures, tokens].

    Args:
        scorer: made for these pictures.
        codes: int64 [pictures, tokens].
        hidden: [pictures, tokens, dim] states that predict them.
        centre, top, proposals: of the same positions.
    """
    pictures, states, known = range(len(codes)), list(hidden), codes.tolist()
    columns = []
    for t in range(codes.shape[1]):
        here = TopLogits(top.values[:, t], top.indices[:, t], top.log_mass[:, t], top.vocab_size)
        before = [tokens[:t] for tokens in known]
        made = proposals[:, t].tolist()
        columns.append(scorer(Reading(pictures, before, made, hidden[:, t], centre[:, t], here, states)))
    return torch.tensor(columns).T


@torch.inference_mode()
def score_costs(device: DeviceModel, gates: Sequence[Scoring], repeats: int = 20) -> dict[str, float]:
    """Microseconds that each gate adds to a position of one picture: the median of some repeats.

    Drawn hidden states stand for a picture in its middle. What a window keeps of earlier positions
    is warm, as it is in use.
    """
    config = device.config.trunk
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (config.tokens,), generator=generator).tolist()
    states = torch.randn(config.tokens + 1, config.dim, generator=generator)
    costs: dict[str, float] = {}
    for scoring in gates:
        scorer = make_scorer(scoring, device, [(0, 0)])
        spent: list[float] = []
        for number in range(repeats + 1):
            t = (config.tokens // 2 + number) % config.tokens
            hidden = states[t : t + 1]
            centre = device.head.centre_logits(hidden)
            reading = Reading([0], [tokens[:t]], [tokens[t]], hidden, centre, top_logits(centre), [states])
            began = time.perf_counter()
            scorer(reading)
            spent.append(time.perf_counter() - began)
        costs[scoring.name] = 1e6 * float(np.median(spent[1:]))  # the first fills windows and caches
    return costs


def score_table(records: GateRecords, resamples: int = 200) -> dict[str, dict[str, Any]]:
    """AUROC and kept total variation of every score, with bootstrap intervals over pictures."""
    table: dict[str, dict[str, Any]] = {}
    for name, scores in records.scores.items():
        kept = bootstrap(
            lambda s, t: kept_mean(s, t, KEEP), list(scores), list(records.tv), resamples=resamples
        )
        table[name] = {
            "auroc": auroc(scores, records.differs),
            "kept_tv": kept.value,
            "kept_tv_low": kept.lower,
            "kept_tv_high": kept.upper,
        }
        if name != "entropy":
            gain = bootstrap(
                lambda s, e, t: kept_mean(e, t, KEEP) - kept_mean(s, t, KEEP),
                list(scores),
                list(records.scores["entropy"]),
                list(records.tv),
                resamples=resamples,
            )
            table[name] |= {"gain": gain.value, "gain_low": gain.lower, "gain_high": gain.upper}
    table["oracle"] = {
        "auroc": auroc(records.tv, records.differs),
        "kept_tv": kept_mean(records.tv, records.tv, KEEP),
    }
    return table


def calibration_split(captions: CaptionBank, train_index: Tensor, count: int) -> list[int]:
    """Numbers of the pictures whose captions calibrate; evaluation leaves their names out."""
    generator = torch.Generator().manual_seed(77)
    order = torch.randperm(len(train_index), generator=generator)[:count]
    return [int(i) for i in train_index[order]]


def calibrate_gate(
    *,
    data: Path,
    text: Path,
    codes: Path,
    backbone: Path,
    device: Path,
    out: Path,
    budget: float = 0.3,
    pictures: int = 64,
    learn: int = 256,
    rounds: int = 3,
    scores: Sequence[str] | None = None,
    seed: int = 0,
    guidance: float = 3.0,
    top_k: int = 128,
) -> dict[str, Any]:
    """Writes ``gate.json`` into ``out``: the table of scores, the chosen one, and every threshold.

    Also trains the learned gate and writes ``gate.safetensors``.

    Args:
        budget: share of a picture's tokens that every threshold uploads.
        pictures: held-out pictures of the table; at most 64 prompts calibrate.
        learn: training pictures of the learned gate; 0 = none.
        rounds: as in :func:`calibrate_threshold`.
        scores: which gates to compare and calibrate; None is all.
    """
    inputs = load_inputs(data, text, codes, backbone)
    model = load_device(device)
    law = SamplingLaw(top_k=min(top_k, inputs.cloud.config.vocab_size))
    out.mkdir(parents=True, exist_ok=True)
    gates = [one for one in untrained_gates() if scores is None or one.name in scores]
    if learn and (scores is None or "learned" in scores):
        gates.append(Scoring("learned", learned=_learned(inputs, model, learn, guidance, law, seed)))
        save_tensors(gates[-1].learned, out / "gate.safetensors")  # type: ignore[arg-type]
    held = inputs.held_index[:: max(1, len(inputs.held_index) // max(pictures, 2))]
    records = record(inputs, model, held, guidance=guidance, law=law, seed=seed, gates=gates)
    table = score_table(records)
    for name, cost in score_costs(model, gates).items():
        table[name]["microseconds"] = cost
    names = [one.name for one in gates]
    telling = [name for name in names if name not in CONTENT_BLIND and name != "softmaxcorr-1"]
    best = min(telling or names, key=lambda name: table[name]["kept_tv"])
    base = Settings("ciar", guidance=guidance, top_k=law.top_k)
    chosen = calibration_split(inputs.captions, inputs.train_index, min(pictures, CALIBRATION_PICTURES))
    thresholds = calibrate_thresholds(inputs, model, chosen, base, gates, budget, rounds, records.scores)
    document = {
        "scores": table,
        "greedy_agreement": float(records.greedy.mean()),
        "mean_tv": float(records.tv.mean()),
        "sampled_agreement": 1.0 - float(records.differs.mean()),
        "pictures": len(held),
        "score": best,
        "threshold": thresholds[best].to_dict(),
        "thresholds": {name: one.to_dict() for name, one in thresholds.items()},
        "budget": budget,
    }
    (out / "gate.json").write_text(json.dumps(document, indent=2) + "\n")
    return document


def _learned(
    inputs: Inputs, device: DeviceModel, count: int, guidance: float, law: SamplingLaw, seed: int
) -> LearnedGate:
    """The learned gate, from training pictures that do not calibrate."""
    calibrating = set(calibration_split(inputs.captions, inputs.train_index, CALIBRATION_PICTURES))
    usable = [int(i) for i in inputs.train_index if int(i) not in calibrating]
    usable = usable or inputs.train_index.tolist()
    order = torch.randperm(len(usable), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = torch.tensor([usable[i] for i in order[:count]])
    return fit_gate(*examples(inputs, device, rows, guidance=guidance, law=law), seed=seed)
