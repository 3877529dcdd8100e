"""Contact sheets and heat maps, as Pillow pictures. Knows nothing of models or metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ciar.errors import InputError
from ciar.ledger import DECIDERS, Decider

#: A picture, or [height, width, 3] uint8.
Picture = Image.Image | NDArray[np.uint8]

#: One colour a decider, told apart with every common colour blindness and, by lightness, in grey.
#: Source: Okabe and Ito, Color Universal Design, https://jfly.uni-koeln.de/color/.
DECIDER_COLOURS: dict[Decider, tuple[int, int, int]] = {
    "prefix": (60, 60, 60),
    "device": (86, 180, 233),
    "accepted": (240, 228, 66),
    "replaced": (213, 94, 0),
}
#: What the legend says beside each colour.
DECIDER_LABELS: dict[Decider, str] = {
    "prefix": "prefix, by the cloud",
    "device": "device alone",
    "accepted": "cloud accepted",
    "replaced": "cloud replaced",
}

_INK = (20, 20, 20)
_PAPER = (255, 255, 255)
_FRAME = (205, 205, 205)
_GAP = 8


def contact_sheet(
    items: Sequence[tuple[str, Picture]],
    *,
    columns: int = 6,
    cell: int = 128,
    title: str = "",
    label_lines: int = 2,
) -> Image.Image:
    """A grid of pictures, each with its caption below.

    Args:
        items: captions and pictures; all are drawn ``cell`` px wide and high.
        columns: pictures a row.
        cell: edge of a picture on the sheet, in px.
        title: a line above the grid; none when empty.
        label_lines: lines that a caption may take; what does not fit ends in "...".

    Raises:
        InputError: there is nothing to draw, or a setting is out of range.
    """
    if not items:
        raise InputError("A contact sheet needs at least one picture.")
    _check_size("columns", columns, 1, 100)
    _check_size("cell", cell, 16, 2048)
    _check_size("label_lines", label_lines, 0, 10)
    font = _font(max(11, cell // 10))
    line = _line_height(font)
    columns = min(columns, len(items))
    rows = -(-len(items) // columns)
    top = _GAP + (_title_height(cell) if title else 0)
    step_x, step_y = cell + _GAP, cell + label_lines * line + _GAP
    sheet = Image.new("RGB", (columns * step_x + _GAP, top + rows * step_y), _PAPER)
    draw = ImageDraw.Draw(sheet)
    _draw_title(draw, title, cell)
    for number, (caption, picture) in enumerate(items):
        row, column = divmod(number, columns)
        x, y = _GAP + column * step_x, top + row * step_y
        _paste(sheet, draw, picture, x, y, cell)
        for i, text in enumerate(wrapped(caption, font, cell, label_lines)):
            draw.text((x, y + cell + i * line), text, fill=_INK, font=font)
    return sheet


def pair_sheet(
    pairs: Sequence[tuple[str, Picture, Picture]],
    *,
    labels: tuple[str, str] = ("original", "reconstruction"),
    columns: int = 4,
    cell: int = 128,
    title: str = "",
) -> Image.Image:
    """A grid of picture pairs side by side, each with its caption below.

    Args:
        pairs: captions, left pictures and right pictures.
        labels: what the left and the right pictures are, written above each column.
        columns: pairs a row.
        cell: edge of a picture on the sheet, in px.
        title: a line above the grid; none when empty.

    Raises:
        InputError: there is nothing to draw, or a setting is out of range.
    """
    if not pairs:
        raise InputError("A sheet of pairs needs at least one pair.")
    _check_size("columns", columns, 1, 100)
    _check_size("cell", cell, 16, 2048)
    font = _font(max(11, cell // 10))
    line = _line_height(font)
    columns = min(columns, len(pairs))
    rows = -(-len(pairs) // columns)
    head = _GAP + (_title_height(cell) if title else 0)
    top = head + line
    step_x, step_y = 2 * cell + 2 + 2 * _GAP, cell + line + _GAP
    sheet = Image.new("RGB", (columns * step_x, top + rows * step_y), _PAPER)
    draw = ImageDraw.Draw(sheet)
    _draw_title(draw, title, cell)
    for column in range(columns):
        for side, label in enumerate(labels):
            x = _GAP + column * step_x + side * (cell + 2)
            draw.text((x, head), _shortened(label, font, cell), fill=_INK, font=font)
    for number, (caption, left, right) in enumerate(pairs):
        row, column = divmod(number, columns)
        x, y = _GAP + column * step_x, top + row * step_y
        _paste(sheet, draw, left, x, y, cell)
        _paste(sheet, draw, right, x + cell + 2, y, cell)
        draw.text((x, y + cell), _shortened(caption, font, 2 * cell), fill=_INK, font=font)
    return sheet


def heatmap(
    picture: Picture, decided: Sequence[Decider], grid: int, *, edge: int = 512, strength: float = 0.45
) -> Image.Image:
    """A picture in grey with each token's cell coloured by who decided it, and a legend with counts.

    Args:
        picture: the finished picture, square.
        decided: for each of the ``grid ** 2`` tokens, row by row, its decider.
        grid: tokens of the picture's edge.
        edge: smallest edge of the picture on the map, in px; cells are whole pixels.
        strength: share of the colour over the picture, in [0, 1].

    Raises:
        InputError: the number of deciders is not ``grid ** 2``, or a decider is unknown.
    """
    _check_size("grid", grid, 1, 1024)
    _check_size("edge", edge, 16, 8192)
    if not 0.0 <= strength <= 1.0:
        raise InputError(f"strength is {strength}; it must lie between 0 and 1.")
    if len(decided) != grid * grid:
        raise InputError(
            f"A heat map of {grid} x {grid} tokens needs {grid * grid} deciders; there are {len(decided)}."
        )
    unknown = set(decided) - set(DECIDERS)
    if unknown:
        raise InputError(f"Unknown deciders {sorted(unknown)}; the known ones are {', '.join(DECIDERS)}.")
    cell = -(-edge // grid)
    size = cell * grid
    # In grey, or the picture's own colours would mix with those that say who decided.
    grey = _rgb(picture).convert("L").resize((size, size), Image.Resampling.LANCZOS)
    base = np.asarray(grey, dtype=np.float32)[:, :, None]
    colours = np.array([DECIDER_COLOURS[name] for name in decided], dtype=np.float32)
    layer = colours.reshape(grid, grid, 3).repeat(cell, axis=0).repeat(cell, axis=1)
    mixed = base * (1.0 - strength) + layer * strength
    if cell >= 8:  # the upper and left edge of each cell, or neighbours of one colour would merge
        mixed[::cell] = mixed[::cell] * 0.7 + layer[::cell] * 0.3
        mixed[:, ::cell] = mixed[:, ::cell] * 0.7 + layer[:, ::cell] * 0.3
    body = Image.fromarray(np.rint(mixed).clip(0, 255).astype(np.uint8))
    return _with_legend(body, decided)


def wrapped(text: str, font: Any, width: int, lines: int) -> list[str]:
    """Breaks a text into at most ``lines`` lines of ``width`` px; what does not fit ends in "..."."""
    words = text.split()
    out: list[str] = []
    while words and len(out) < lines:
        if len(out) == lines - 1:
            out.append(_shortened(" ".join(words), font, width))
            break
        taken = 1
        while taken < len(words) and font.getlength(" ".join(words[: taken + 1])) <= width:
            taken += 1
        out.append(_shortened(" ".join(words[:taken]), font, width))
        words = words[taken:]
    return out


def _with_legend(body: Image.Image, decided: Sequence[Decider]) -> Image.Image:
    size = body.width
    font = _font(max(11, size // 32))
    line = _line_height(font) + 4
    columns = 2 if size >= 300 else 1
    rows = -(-len(DECIDERS) // columns)
    sheet = Image.new("RGB", (size, size + rows * line + _GAP), _PAPER)
    sheet.paste(body, (0, 0))
    draw = ImageDraw.Draw(sheet)
    for number, name in enumerate(DECIDERS):
        row, column = divmod(number, columns)
        x, y = 4 + column * (size // columns), size + 4 + row * line
        box = line - 8
        draw.rectangle((x, y, x + box, y + box), fill=DECIDER_COLOURS[name], outline=_INK)
        share = decided.count(name) / len(decided)
        text = f"{DECIDER_LABELS[name]}: {decided.count(name)} ({share:.0%})"
        room = size // columns - box - 12
        draw.text((x + box + 6, y - 2), _shortened(text, font, room), fill=_INK, font=font)
    return sheet


def _paste(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, picture: Picture, x: int, y: int, cell: int
) -> None:
    image = _rgb(picture)
    # Enlarged pictures keep their pixels, so that a sheet shows what the decoder really drew.
    way = Image.Resampling.NEAREST if image.width <= cell else Image.Resampling.LANCZOS
    sheet.paste(image.resize((cell, cell), way), (x, y))
    draw.rectangle((x - 1, y - 1, x + cell, y + cell), outline=_FRAME)


def _rgb(picture: Picture) -> Image.Image:
    if isinstance(picture, Image.Image):
        if picture.mode in ("RGBA", "LA", "PA"):
            canvas = Image.new("RGBA", picture.size, (*_PAPER, 255))
            canvas.alpha_composite(picture.convert("RGBA"))
            return canvas.convert("RGB")
        return picture.convert("RGB")
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8 or 0 in picture.shape:
        raise InputError(
            f"A picture must be uint8 [height, width, 3]; this is {picture.dtype} {list(picture.shape)}."
        )
    return Image.fromarray(np.ascontiguousarray(picture))


def _font(size: int) -> Any:
    return ImageFont.load_default(size=size)


def _line_height(font: Any) -> int:
    ascent, descent = font.getmetrics()
    return int(ascent + descent) + 2


def _title_height(cell: int) -> int:
    return _line_height(_font(max(14, cell // 8))) + 4


def _draw_title(draw: ImageDraw.ImageDraw, title: str, cell: int) -> None:
    if title:
        draw.text((_GAP, _GAP // 2), title, fill=_INK, font=_font(max(14, cell // 8)))


def _shortened(text: str, font: Any, width: int) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text.rstrip() + "..."


def _check_size(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InputError(f"{name} is {value}; it must lie between {low} and {high}.")
