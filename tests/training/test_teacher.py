"""The teacher's side of distillation: guided laws, the cache on disk, drifted prefixes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_device, tiny_gpt, tiny_text
from torch import Tensor

from ciar.decoding.sampling import SamplingLaw, guide
from ciar.models.families import for_decoding
from ciar.training import teacher as teacher_module
from ciar.training.teacher import TEACHER_TOP_K, build_teacher_set, drifted_sequences, guided_logits

CLOUD = tiny_gpt()
PROMPTS = ["cat", "a smiling dog", "a red car with sunglasses", "sun", "a red cat"]


def features_of(pictures: Tensor) -> tuple[Tensor, Tensor]:
    texts = [tiny_text().encode(PROMPTS[i]) for i in pictures.tolist()]
    return torch.stack([t.features for t in texts]), torch.stack([t.mask for t in texts])


CODES = torch.randint(64, (5, 16), generator=torch.Generator().manual_seed(0))


def test_guided_logits_are_the_formula() -> None:
    features, mask = features_of(torch.arange(5))
    found = guided_logits(CLOUD, features, mask, CODES, 2.5)
    assert found.shape == (5, 16, 64)
    for row in range(5):
        valid = int(mask[row].sum())
        ones = torch.ones(1, valid, dtype=torch.bool)
        null = CLOUD.cls_embedding.uncond_embedding[-valid:][None]
        with torch.no_grad():
            logits = [
                CLOUD.head(CLOUD.train_hidden(text, ones, CODES[row : row + 1, :-1]))[0]
                for text in (features[row : row + 1, -valid:], null)
            ]
        torch.testing.assert_close(found[row], guide(*logits, 2.5), atol=1e-4, rtol=0.0)


def test_the_cache_holds_the_top_of_the_law(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_module, "TEACHER_TOP_K", 12)
    pictures = torch.arange(5)
    made = build_teacher_set(CLOUD, CODES, pictures, features_of, 2.5, tmp_path, batch=2)
    assert len(made) == 5
    assert (made.indices.dtype, made.logits.dtype) == (np.uint16, np.float16)
    rows = torch.tensor([4, 1])
    target = made.target(rows)
    assert target.indices.shape == target.log_probs.shape == (32, 12)
    features, mask = features_of(pictures[rows])
    guided = guided_logits(CLOUD, features, mask, CODES[rows], 2.5).flatten(0, 1)
    expected = guided.topk(12, dim=-1)
    assert torch.equal(target.indices, expected.indices)
    torch.testing.assert_close(target.log_probs.exp(), expected.values.softmax(-1), atol=5e-3, rtol=0.0)
    torch.testing.assert_close(target.log_probs.exp().sum(-1), torch.ones(32))


def test_small_vocabularies_are_kept_whole(tmp_path: Path) -> None:
    assert TEACHER_TOP_K > 64
    made = build_teacher_set(CLOUD, CODES, torch.arange(5), features_of, 3.0, tmp_path)
    assert made.indices.shape == (5, 16, 64)


def test_an_interrupted_cache_goes_on(tmp_path: Path) -> None:
    whole = build_teacher_set(CLOUD, CODES, torch.arange(5), features_of, 3.0, tmp_path / "a", batch=2)
    asked: list[int] = []

    def interrupted(pictures: Tensor) -> tuple[Tensor, Tensor]:
        asked.extend(pictures.tolist())
        if len(asked) == 4:
            raise KeyboardInterrupt
        return features_of(pictures)

    with pytest.raises(KeyboardInterrupt):
        build_teacher_set(CLOUD, CODES, torch.arange(5), interrupted, 3.0, tmp_path / "b", batch=2)
    assert json.loads((tmp_path / "b" / "progress.json").read_text())["done"] == 2
    resumed = build_teacher_set(CLOUD, CODES, torch.arange(5), interrupted, 3.0, tmp_path / "b", batch=2)
    assert asked == [0, 1, 2, 3, 2, 3, 4]
    assert (resumed.indices == whole.indices).all()
    assert (resumed.logits == whole.logits).all()


@pytest.mark.parametrize("changed", ["weights", "codes", "pictures", "scale"])
def test_a_cache_of_something_else_is_made_anew(tmp_path: Path, changed: str) -> None:
    values = {"model": CLOUD, "codes": CODES, "pictures": torch.arange(5), "scale": 3.0}
    build_teacher_set(**values, features_of=features_of, out=tmp_path)  # type: ignore[arg-type]
    other = {
        "weights": {"model": tiny_gpt(8)},
        "codes": {"codes": CODES.flip(0)},
        "pictures": {"pictures": torch.arange(5).flip(0)},
        "scale": {"scale": 2.0},
    }[changed]
    again = build_teacher_set(**(values | other), features_of=features_of, out=tmp_path)  # type: ignore[arg-type]
    fresh = build_teacher_set(**(values | other), features_of=features_of, out=tmp_path / "fresh")  # type: ignore[arg-type]
    assert (np.asarray(again.logits) == np.asarray(fresh.logits)).all()
    assert (np.asarray(again.indices) == np.asarray(fresh.indices)).all()


def test_a_cache_that_was_emptied_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    """Another run that is stopped at once leaves zeros, and says so to whoever comes back."""
    first = build_teacher_set(CLOUD, CODES, torch.arange(5), features_of, 3.0, tmp_path)
    logits, indices = np.array(first.logits), np.array(first.indices)

    def stopped(_: Tensor) -> tuple[Tensor, Tensor]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_teacher_set(CLOUD, CODES, torch.arange(5), stopped, 2.0, tmp_path)
    again = build_teacher_set(CLOUD, CODES, torch.arange(5), features_of, 3.0, tmp_path)
    assert (again.logits == logits).all()
    assert (again.indices == indices).all()


def test_a_model_in_its_decoding_form_needs_a_digest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs the digest"):
        build_teacher_set(for_decoding(CLOUD), CODES, torch.arange(5), features_of, 3.0, tmp_path)


def test_drifted_sequences_keep_a_real_prefix_and_draw_the_rest() -> None:
    device = tiny_device()
    rows = 64
    codes = torch.randint(64, (rows, 16), generator=torch.Generator().manual_seed(1))
    features, mask = features_of(torch.arange(rows) % 5)
    law = SamplingLaw(top_k=3)

    def run(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return drifted_sequences(device, features, mask, codes, law, generator)

    drifted = run(0)
    assert torch.equal(drifted, run(0))
    assert not torch.equal(drifted, run(1))
    # The first draw of the generator is where each row's real prefix ends.
    cut = torch.randint(0, 16, (rows,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = device.train_hidden(features, mask, drifted[:, :-1])
        best = device.head.centre_logits(hidden).topk(3, dim=-1).indices  # [rows, 16, 3]
    in_support = (best == drifted[:, :, None]).any(-1)
    for row in range(rows):
        assert torch.equal(drifted[row, : cut[row]], codes[row, : cut[row]])
        assert in_support[row, cut[row] :].all()
    # All three codes of the law are drawn, so it is no greedy continuation.
    ranks = (best == drifted[:, :, None]).int().argmax(-1)[in_support]
    assert set(ranks.tolist()) == {0, 1, 2}
