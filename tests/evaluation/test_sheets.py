"""Sheets: pictures land where they should, labels fit, and heat maps say who decided what."""

import itertools

import numpy as np
import pytest
from PIL import Image, ImageFont

from ciar.errors import InputError
from ciar.evaluation.sheets import DECIDER_COLOURS, contact_sheet, heatmap, pair_sheet, wrapped
from ciar.ledger import DECIDERS


def plain(red: int, green: int, blue: int, edge: int = 32) -> np.ndarray:
    return np.full((edge, edge, 3), (red, green, blue), dtype=np.uint8)


def find(sheet: Image.Image, colour: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of the pixels of exactly one colour."""
    ys, xs = np.nonzero((np.asarray(sheet) == colour).all(axis=2))
    return int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1


def test_pictures_stand_in_rows_at_full_size():
    colours = [(200, 10, 10), (10, 200, 10), (10, 10, 200), (120, 0, 120), (0, 120, 120)]
    sheet = contact_sheet([(str(c), plain(*c)) for c in colours], columns=3, cell=64)
    boxes = [find(sheet, c) for c in colours]
    assert all((right - left, bottom - top) == (64, 64) for left, top, right, bottom in boxes)
    assert [box[1] for box in boxes[:3]] == [boxes[0][1]] * 3
    assert boxes[0][0] < boxes[1][0] < boxes[2][0]
    assert (boxes[3][0], boxes[4][0]) == (boxes[0][0], boxes[1][0])
    assert boxes[3][1] > boxes[0][3]
    assert sheet.mode == "RGB"


def test_captions_are_drawn_below_their_picture_and_inside_its_column():
    red, blank = (200, 10, 10), (250, 250, 250)
    long = "a very long caption " * 8
    sheet = contact_sheet([(long, plain(*red)), ("", plain(*blank))], columns=2, cell=96)
    left, _, right, bottom = find(sheet, red)
    ink = np.asarray(sheet.convert("L"))[bottom + 1 :] < 128
    columns = np.nonzero(ink.any(axis=0))[0]
    assert ink.sum() > 100
    assert left <= columns.min()
    assert columns.max() <= right


def test_title_makes_the_sheet_taller():
    items = [("cat", plain(1, 2, 3))]
    with_title = contact_sheet(items, title="Held-out names")
    without = contact_sheet(items)
    assert with_title.height > without.height
    assert with_title.width == without.width


def test_pairs_stand_side_by_side():
    left, right = (200, 10, 10), (10, 200, 10)
    sheet = pair_sheet([("cat", plain(*left), Image.fromarray(plain(*right)))] * 3, columns=2, cell=48)
    one, two = find(sheet, left), find(sheet, right)
    assert one[1] == two[1]
    assert two[0] - one[0] == 48 + 2
    assert two[3] - two[1] == one[3] - one[1] > 2 * 48  # two rows


def test_transparent_pictures_are_laid_on_white():
    clear = Image.new("RGBA", (32, 32), (255, 0, 0, 0))
    pixels = np.asarray(contact_sheet([("", clear)], cell=32))
    assert (pixels[12:36, 12:36] == 255).all()


def test_wrapped_lines_fit_and_say_when_something_is_left_out():
    font = ImageFont.load_default(size=12)
    text = "smiling cat face with heart shaped eyes and a very long name noto"
    lines = wrapped(text, font, 100, 2)
    assert len(lines) == 2
    assert all(font.getlength(line) <= 100 for line in lines)
    assert lines[1].endswith("...")
    assert " ".join(wrapped(text, font, 100, 10)) == text
    assert wrapped("", font, 100, 2) == []
    assert wrapped("donaudampfschifffahrtsgesellschaftskapitaen", font, 60, 1)[0].endswith("...")


def test_heatmap_colours_each_cell_by_its_decider():
    decided = [DECIDERS[i % 4] for i in range(16)]
    white = plain(255, 255, 255, edge=64)
    image = heatmap(white, decided, 4, edge=128, strength=0.5)
    pixels = np.asarray(image).astype(int)
    for position, name in enumerate(decided):
        row, column = divmod(position, 4)
        expected = (255 + np.array(DECIDER_COLOURS[name])) / 2
        centre = pixels[row * 32 + 16, column * 32 + 16]
        assert np.abs(centre - expected).max() <= 1, name
    assert image.width == 128
    assert image.height > 128  # the legend


def test_heatmap_shows_the_picture_through():
    decided = ["device"] * 64 + ["replaced"] * 192
    split = plain(255, 255, 255, edge=128)
    split[:, :64] = 0
    pixels = np.asarray(heatmap(split, decided, 16)).astype(int)
    assert pixels[80:120, 300:500].mean() - pixels[80:120, 20:200].mean() > 100


def test_legend_shows_every_colour_even_of_absent_deciders():
    image = heatmap(plain(255, 255, 255), ["device"] * 4, 2, strength=0.0)
    legend = np.asarray(image)[512:]
    for name in DECIDERS:
        assert (legend == DECIDER_COLOURS[name]).all(axis=2).sum() > 50, name


#: Viénot, Brettel and Mollon (1999), on linear RGB: what protanopes and deuteranopes see.
BLINDNESS = {
    "protanope": [[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]],
    "deuteranope": [[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]],
}


def luminance_and_seen(colour: tuple[int, int, int], kind: str) -> np.ndarray:
    linear = (np.array(colour) / 255) ** 2.2
    return 255 * np.clip(np.array(BLINDNESS[kind]) @ linear, 0, 1) ** (1 / 2.2)


@pytest.mark.parametrize("kind", sorted(BLINDNESS))
def test_colours_are_told_apart_by_the_colour_blind(kind: str):
    for one, two in itertools.combinations(DECIDER_COLOURS.values(), 2):
        assert np.linalg.norm(luminance_and_seen(one, kind) - luminance_and_seen(two, kind)) > 60


def test_colours_differ_in_grey():
    greys = sorted(float(np.dot(c, (0.299, 0.587, 0.114))) for c in DECIDER_COLOURS.values())
    assert min(b - a for a, b in itertools.pairwise(greys)) > 25


@pytest.mark.parametrize(
    ("decided", "grid", "word"),
    [([], 4, "16 deciders; there are 0"), (["device"] * 15, 4, "15"), (["cloud"] * 16, 4, "cloud")],
)
def test_deciders_that_do_not_fit_are_refused(decided: list, grid: int, word: str):
    with pytest.raises(InputError, match=word):
        heatmap(plain(1, 2, 3), decided, grid)


def test_bad_settings_and_pictures_are_refused():
    picture = plain(1, 2, 3)
    with pytest.raises(InputError, match="at least one picture"):
        contact_sheet([])
    with pytest.raises(InputError, match="at least one pair"):
        pair_sheet([])
    with pytest.raises(InputError, match="columns is 0"):
        contact_sheet([("a", picture)], columns=0)
    with pytest.raises(InputError, match="cell is 5000"):
        pair_sheet([("a", picture, picture)], cell=5000)
    with pytest.raises(InputError, match="strength"):
        heatmap(picture, ["device"], 1, strength=1.5)
    with pytest.raises(InputError, match="uint8"):
        contact_sheet([("a", picture.astype(np.float32))])
