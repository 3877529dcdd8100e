"""The emoji data set: which icons are kept, how they are split, how a picture is rendered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciar.errors import DataError
from ciar.training.data.emoji import (
    HELD_OUT_NAME_SHARE,
    HELD_OUT_PAIR_SHARE,
    STYLES,
    build,
    collect,
    icon_svg,
    kept_name,
    load_synonyms,
    render,
    split_of,
    without_tone,
)

WORDS = [word for _, word, _ in STYLES]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("cat-face", "cat-face"),
        ("waving-hand", "waving-hand"),
        ("waving-hand-medium-skin-tone", "waving-hand-medium-skin-tone"),
        ("waving-hand-medium", "waving-hand-medium-skin-tone"),
        ("waving-hand-light-skin-tone", None),
        ("waving-hand-medium-dark-skin-tone", None),
        ("waving-hand-medium-dark", None),
        ("waving-hand-dark", None),
        ("man-medium-skin-tone-beard", "man-beard-medium-skin-tone"),
        ("people-holding-hands-medium-skin-tone-light-skin-tone", None),
        ("handshake-medium-skin-tone-medium-skin-tone", "handshake-medium-skin-tone"),
        # Names in which a tone word belongs to the thing.
        ("horizontal-traffic-light", "horizontal-traffic-light"),
        ("white-medium-square", "white-medium-square"),
        ("black-medium-small-square", "black-medium-small-square"),
        ("speaker-medium-volume", "speaker-medium-volume"),
        ("medium", None),
        ("medium-skin-tone", None),
        ("dark-skin-tone", None),
        ("light-bulb", "light-bulb"),
        ("flashlight", "flashlight"),
    ],
)
def test_kept_names(name: str, kept: str | None) -> None:
    assert kept_name(name) == kept


def test_tones_of_one_thing_share_a_name() -> None:
    for name in ("waving-hand", "waving-hand-medium-skin-tone", "waving-hand-dark"):
        assert without_tone(name) == "waving-hand"
    assert without_tone("horizontal-traffic-light") == "horizontal-traffic-light"


@given(name=st.from_regex(r"[a-z]{2,12}(-[a-z]{2,8})?", fullmatch=True))
def test_a_name_is_held_out_in_all_styles_or_in_one_at_most(name: str) -> None:
    splits = [split_of(name, style) for style in WORDS]
    if "held_name" in splits:
        assert splits == ["held_name"] * 4
    else:
        assert splits.count("held_pair") <= 1
    # A tone variant never leaks a held-out thing into training.
    assert splits == [split_of(f"{name}-medium-skin-tone", style) for style in WORDS]


def test_shares_of_the_split() -> None:
    pairs = [split_of(f"thing-{i}", style) for i in range(5000) for style in WORDS]
    names = pairs.count("held_name") / len(pairs)
    held_pairs = pairs.count("held_pair") / len(pairs)
    # Four standard deviations of 5,000 draws of 4 %; pairs are drawn among the names that are left.
    assert names == pytest.approx(HELD_OUT_NAME_SHARE, abs=0.011)
    assert held_pairs == pytest.approx(HELD_OUT_PAIR_SHARE * (1 - names), abs=0.006)


#: Styles in the order of STYLES.
GOLDEN_SPLIT = {
    "cat-face": ["train"] * 4,
    "sun": ["held_name"] * 4,
    "pizza": ["held_name"] * 4,
    "dog": ["held_pair", "train", "train", "train"],
    "rocket": ["train", "held_pair", "train", "train"],
    "octopus": ["held_pair", "train", "train", "train"],
}


def test_the_split_is_stable() -> None:
    """These must never change: weights that ship were trained on this split."""
    found = {name: [split_of(name, style) for style in WORDS] for name in GOLDEN_SPLIT}
    assert found == GOLDEN_SPLIT


def test_svg_document() -> None:
    body = {"body": "<path/>", "left": 1, "width": 20}
    svg = icon_svg(body, {"height": 24, "width": 99})
    assert 'viewBox="1 0 20 24"' in svg
    assert svg.endswith("><path/></svg>")
    assert 'viewBox="0 0 16 16"' in icon_svg({"body": ""}, {})


def node_modules(folder: Path) -> Path:
    """Packages of three icons each, one with tone variants."""
    square = '<rect x="0" y="0" width="8" height="16" fill="#f00"/>'
    icons = {name: {"body": square} for name in ("red-square", "hand", "hand-dark", "hand-medium")}
    for package, _, _ in STYLES:
        home = folder / f"@iconify-json/{package}"
        home.mkdir(parents=True)
        (home / "icons.json").write_text(json.dumps({"icons": icons, "width": 16, "height": 16}))
        (home / "chars.json").write_text(json.dumps({"1f7e5": "red-square", "270b": "hand"}))
        (home / "package.json").write_text(json.dumps({"version": "1.2.3"}))
    lib = folder / "emojilib"
    (lib / "dist").mkdir(parents=True)
    words = {"\U0001f7e5": ["red_square", "Shape", "x", "<bad>", "colour"], "\u270b": ["stop"]}
    (lib / "dist/emoji-en-US.json").write_text(json.dumps(words))
    (lib / "package.json").write_text(json.dumps({"version": "4.0.0"}))
    return folder


def test_collecting(tmp_path: Path) -> None:
    found = [icon for icon, _ in collect(node_modules(tmp_path))]
    assert [icon.name for icon in found[:3]] == ["hand", "hand-medium-skin-tone", "red-square"]
    assert [icon.style for icon in found[::3]] == WORDS
    assert found[2].synonyms == ("red square", "shape", "colour")
    assert found[1].synonyms == found[0].synonyms == ("stop",)
    assert load_synonyms(tmp_path)["hand"] == ("stop",)


def test_rendering() -> None:
    pytest.importorskip("resvg_py")
    wide = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 10"><rect width="20" height="10"/></svg>'
    picture = render(wide, 16)
    assert (picture.shape, picture.dtype) == ((16, 16, 3), np.uint8)
    assert (picture[0] == 255).all()  # white above what is not square
    assert (picture[8, 1:15] == 0).all()


def test_building(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    card: dict[str, Any] = build(node_modules(tmp_path / "packages"), tmp_path / "data", 16, workers=1)
    images = np.load(tmp_path / "data" / "images.npy")
    assert images.shape == (12, 16, 16, 3)
    assert (images[2, :, :7] == [255, 0, 0]).all()
    assert (images[2, :, 9:] == 255).all()
    assert (card["pictures"], card["names"], card["size"]) == (12, 3, 16)
    assert card["by_style"] == dict.fromkeys(WORDS, 3)
    assert sum(card["by_split"].values()) == 12
    assert card["packages"]["twemoji"] == "1.2.3"
    assert card["licences"]["twemoji"] == "CC-BY-4.0"
    assert len(json.loads((tmp_path / "data" / "captions.json").read_text())) == 12
    assert json.loads((tmp_path / "data" / "card.json").read_text()) == card


def test_missing_packages_say_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="npm install --prefix recipes/emoji"):
        build(tmp_path, tmp_path / "data")
