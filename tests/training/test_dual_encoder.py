"""The judge: its loss, its distortions, and that it learns to tell pictures by their captions."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ciar.errors import CheckpointError, DataError, InputError
from ciar.evaluation.features import caption_features, image_features
from ciar.models.dual_encoder import MAX_SCALE, DualEncoder, DualEncoderConfig
from ciar.models.text import StaticTextEncoder
from ciar.training.data.emoji import Icon
from ciar.training.dual_encoder import (
    DualEncoderTask,
    DualEncoderTraining,
    blur,
    contrastive_loss,
    distort,
    reduced,
    train_dual_encoder,
)
from ciar.training.loop import LoopConfig

COLOURS = {
    "red": (220, 30, 30),
    "green": (20, 160, 40),
    "blue": (30, 60, 220),
    "yellow": (240, 220, 40),
    "black": (10, 10, 10),
    "pink": (250, 150, 190),
}
SHAPES = ("top", "bottom", "left", "right")
SMALL = DualEncoderConfig(image_size=16, channels=(8, 8, 16, 16), feature_dim=16, caption_dim=12)


def draw(colour: str, shape: str) -> np.ndarray:
    picture = np.full((32, 32, 3), 255, dtype=np.uint8)
    rows = {"top": slice(0, 16), "bottom": slice(16, 32)}.get(shape, slice(4, 28))
    columns = {"left": slice(0, 16), "right": slice(16, 32)}.get(shape, slice(4, 28))
    picture[rows, columns] = COLOURS[colour]
    return picture


def make_data(folder: Path) -> tuple[Path, Path]:
    """24 things in two styles; a held pair has its other style in training."""
    icons, pictures = [], []
    for style in ("flat", "noto"):
        for number, (colour, shape) in enumerate((c, s) for c in COLOURS for s in SHAPES):
            held = style == "noto" and number % 4 == 1
            icons.append(Icon(f"{colour}-{shape}", style, "held_pair" if held else "train", ()))
            picture = draw(colour, shape)
            pictures.append(picture // 4 * 3 + 60 if style == "noto" else picture)
    data, text = folder / "data", folder / "text"
    data.mkdir()
    text.mkdir()
    np.save(data / "images.npy", np.stack(pictures))
    (data / "captions.json").write_text(json.dumps([asdict(icon) for icon in icons]))
    vocabulary = ["[UNK]", "a", "an", "flat", "noto", *COLOURS, *SHAPES]
    table = torch.randn(len(vocabulary), 12, generator=torch.Generator().manual_seed(0))
    StaticTextEncoder(vocabulary, table, 8).save(text)
    return data, text


LOOP = LoopConfig(steps=80, warmup=5, log_every=40, eval_every=80)
TRAINING = DualEncoderTraining(batch=24, lr=5e-3, shift=1)


def test_judge_learns_and_is_read_back(tmp_path: Path):
    data, text = make_data(tmp_path)
    figures = train_dual_encoder(data, text, tmp_path / "out", LOOP, config=TRAINING, model=SMALL)
    # 24 captions to choose among: chance is 4 %.
    assert figures["held_top1_train"] > 0.8
    assert figures["held_top1_held_pair"] >= 0.5
    model, encoder = DualEncoder.load(tmp_path / "out"), StaticTextEncoder.load(text)
    assert not model.training
    pictures = np.load(data / "images.npy")
    features = image_features(model, pictures)
    assert features.shape == (48, 16)
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1.0, rtol=1e-5)
    # Features of a picture do not depend on its batch.
    np.testing.assert_allclose(image_features(model, pictures[7:8], batch=1)[0], features[7], atol=1e-5)
    captions = caption_features(model, encoder, ["red top flat", "blue left flat", "black right"])
    pair = image_features(model, np.stack([draw("red", "top"), draw("blue", "left")]))
    assert (pair @ captions.T).argmax(axis=1).tolist() == [0, 1]


def test_training_again_gives_the_same_weights_and_leaves_the_global_state_alone(tmp_path: Path):
    data, text = make_data(tmp_path)
    loop = replace(LOOP, steps=4, warmup=1, log_every=4, eval_every=4)
    weights = []
    for run in range(2):
        torch.manual_seed(run)
        before = torch.get_rng_state()
        train_dual_encoder(data, text, tmp_path / f"out{run}", loop, config=TRAINING, model=SMALL)
        assert torch.equal(torch.get_rng_state(), before)
        weights.append(DualEncoder.load(tmp_path / f"out{run}").state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_only_training_pictures_are_trained_on(tmp_path: Path):
    data, text = make_data(tmp_path)
    encoder = StaticTextEncoder.load(text)
    pictures = np.load(data / "images.npy")
    icons = [Icon(**record) for record in json.loads((data / "captions.json").read_text())]
    changed = pictures.copy()
    changed[[i for i, icon in enumerate(icons) if icon.split != "train"]] = 0
    losses = []
    for some in (pictures, changed):
        task = DualEncoderTask(some, icons, encoder, SMALL, TRAINING, LOOP)
        losses.append([float(task.loss(s, torch.Generator().manual_seed(s))[0].detach()) for s in range(3)])
    assert losses[0] == losses[1]


def test_missing_or_mismatched_data_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="Build the data set first"):
        train_dual_encoder(tmp_path / "none", tmp_path, tmp_path / "out", LOOP)
    data, text = make_data(tmp_path)
    np.save(data / "images.npy", np.zeros((3, 32, 32, 3), dtype=np.uint8))
    with pytest.raises(DataError, match="3 pictures and 48 captions"):
        train_dual_encoder(data, text, tmp_path / "out", LOOP, model=SMALL)


def test_loss_of_perfect_and_of_uniform_features():
    kinds = torch.arange(8)
    eye = torch.eye(8)
    loss, accuracy = contrastive_loss(eye, eye, torch.tensor(50.0), kinds)
    assert loss < 1e-6
    assert accuracy == 1.0
    alike = F.normalize(torch.ones(8, 8), dim=-1)
    loss, _ = contrastive_loss(alike, alike, torch.tensor(50.0), kinds)
    assert float(loss) == pytest.approx(np.log(8), rel=1e-6)


def test_pictures_of_one_name_are_no_negatives():
    alike = F.normalize(torch.ones(4, 8), dim=-1)
    loss, _ = contrastive_loss(alike, alike, torch.tensor(10.0), torch.tensor([0, 0, 1, 1]))
    assert float(loss) == pytest.approx(np.log(3), rel=1e-6)  # itself and the two of the other name
    loss, _ = contrastive_loss(alike, alike, torch.tensor(10.0), torch.zeros(4, dtype=torch.int64))
    assert float(loss) == 0.0


def test_distortion_is_small_and_its_own_for_each_picture():
    flat = torch.full((6, 3, 16, 16), 0.2)
    config = DualEncoderTraining(shift=0, noise=0.0, colour=0.1)
    out = distort(flat, config, torch.Generator().manual_seed(0))
    assert (out - flat).abs().max() <= 0.2 * 0.1 + 0.05 + 1e-6
    assert len({round(float(value), 6) for value in out[:, 0, 0, 0]}) == 6
    still = distort(flat, replace(config, colour=0.0), torch.Generator().manual_seed(0))
    torch.testing.assert_close(still, flat)
    noisy = distort(flat, replace(config, colour=0.0, noise=0.06), torch.Generator().manual_seed(0))
    assert 0.005 < float((noisy - flat).std()) < 0.06


def test_shift_moves_each_picture_by_whole_pixels_on_white():
    images = torch.ones(64, 3, 16, 16)
    images[:, :, 8, 8] = -1.0
    config = DualEncoderTraining(shift=2, noise=0.0, colour=0.0)
    moved = distort(images, config, torch.Generator().manual_seed(3))
    places = {tuple(divmod(int(image[0].argmin()), 16)) for image in moved}
    assert places <= {(y, x) for y in range(6, 11) for x in range(6, 11)}
    assert len(places) > 15
    # A blur keeps the mean, and the shift stays inside the picture.
    torch.testing.assert_close(moved.mean(), images.mean(), rtol=1e-4, atol=1e-4)


def test_blur_keeps_flat_pictures_and_spreads_a_point():
    torch.testing.assert_close(blur(torch.full((1, 3, 5, 5), 0.3)), torch.full((1, 3, 5, 5), 0.3))
    point = torch.zeros(1, 1, 5, 5)
    point[0, 0, 2, 2] = 16.0
    expected = torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]])
    torch.testing.assert_close(blur(point)[0, 0, 1:4, 1:4], expected)


def test_reduced_averages_and_refuses_odd_sizes():
    picture = np.zeros((1, 4, 4, 3), dtype=np.uint8)
    picture[0, :2, :2, 0] = [[10, 20], [30, 41]]
    small = reduced(picture, np.array([0]), 2)
    assert small[0, :, :, 0].tolist() == [[25, 0], [0, 0]]
    with pytest.raises(DataError, match="multiple of 3"):
        reduced(picture, np.array([0]), 3)


def test_padding_and_count_of_pieces_do_not_change_a_caption():
    model = DualEncoder(SMALL).eval()
    rows = torch.randn(1, 3, 12, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([torch.zeros(1, 2, 12), rows], dim=1)
    mask = torch.tensor([[False, False, True, True, True]])
    short = model.encode_captions(rows, torch.ones(1, 3, dtype=torch.bool))
    torch.testing.assert_close(model.encode_captions(padded, mask), short)
    torch.testing.assert_close(model.encode_captions(rows.repeat(1, 2, 1), torch.ones(1, 6).bool()), short)


def test_pictures_of_twice_the_size_have_the_features_of_their_average():
    model = DualEncoder(SMALL).eval()
    small = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    large = small.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    torch.testing.assert_close(model.encode_pictures(large), model.encode_pictures(small))


@pytest.mark.parametrize("shape", [(1, 3, 24, 24), (1, 3, 32, 16), (1, 1, 16, 16), (3, 16, 16), (1, 3, 0, 0)])
def test_pictures_of_another_shape_are_refused(shape: tuple[int, ...]):
    with pytest.raises(InputError, match="multiple of 16"):
        DualEncoder(SMALL).encode_pictures(torch.zeros(shape))


def test_scale_has_a_ceiling():
    model = DualEncoder(SMALL)
    assert float(model.scale.detach()) == pytest.approx(1 / 0.07, rel=1e-6)
    with torch.no_grad():
        model.log_scale.fill_(10.0)
    assert float(model.scale.detach()) == MAX_SCALE


def test_another_text_encoder_is_refused(tmp_path: Path):
    _, text = make_data(tmp_path)
    encoder = StaticTextEncoder.load(text)
    model = DualEncoder(replace(SMALL, text_digest="0" * 64))
    with pytest.raises(CheckpointError, match="another text encoder"):
        caption_features(model, encoder, ["red top"])


@pytest.mark.parametrize("fault", ["no-weights", "no-config", "cut", "unknown", "size", "text"])
def test_damaged_files_are_refused(tmp_path: Path, fault: str):
    DualEncoder(SMALL).save(tmp_path)
    weights, config = tmp_path / "dual_encoder.safetensors", tmp_path / "dual_encoder.json"
    settings = json.loads(config.read_text())
    if fault == "no-weights":
        weights.unlink()
    elif fault == "no-config":
        config.unlink()
    elif fault == "cut":
        weights.write_bytes(weights.read_bytes()[:500])
    elif fault == "unknown":
        config.write_text(json.dumps(settings | {"depth": 3}))
    elif fault == "size":
        config.write_text(json.dumps(settings | {"feature_dim": 24}))
    else:
        config.write_text("{")
    with pytest.raises(CheckpointError):
        DualEncoder.load(tmp_path)


def test_saved_encoder_gives_the_same_features(tmp_path: Path):
    model = DualEncoder(SMALL).eval()
    model.save(tmp_path)
    pictures = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
    loaded = DualEncoder.load(tmp_path)
    assert loaded.config == SMALL
    np.testing.assert_allclose(image_features(loaded, pictures), image_features(model, pictures), atol=1e-6)
    assert not any(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize(
    "pictures",
    [
        np.zeros((2, 16, 16, 3), dtype=np.float32),
        np.zeros((16, 16, 3), dtype=np.uint8),
        np.zeros((2, 3, 16, 16), dtype=np.uint8),
    ],
)
def test_features_of_wrong_arrays_are_refused(pictures: np.ndarray):
    with pytest.raises(InputError, match="uint8"):
        image_features(DualEncoder(SMALL), pictures)


def test_features_leave_the_training_mode_as_it_was():
    model = DualEncoder(SMALL).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    image_features(model, np.zeros((2, 16, 16, 3), dtype=np.uint8))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
