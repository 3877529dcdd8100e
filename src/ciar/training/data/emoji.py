"""Builds the emoji data set: pictures, captions and the held-out split.

Knows the layout of the Iconify JSON packages and of ``emojilib``; knows nothing of models. The
packages are read from a ``node_modules`` folder that ``recipes/emoji`` fills with npm, so nothing
here touches the network.

Output folder::

    images.npy      [pictures, 128, 128, 3] uint8, RGB on white
    captions.json   one record a picture: name, style, split, synonyms
    card.json       counts, package versions, licences and digests
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ciar.errors import DataError

#: Iconify package, the word that names its style in a caption, and its licence.
STYLES: tuple[tuple[str, str, str], ...] = (
    ("noto", "noto", "Apache-2.0"),
    ("fluent-emoji", "fluent", "MIT"),
    ("fluent-emoji-flat", "flat", "MIT"),
    ("twemoji", "twemoji", "CC-BY-4.0"),
)
#: Share of names held out in every style, and of further (name, style) pairs held out in one.
HELD_OUT_NAME_SHARE = 0.04
HELD_OUT_PAIR_SHARE = 0.04

_TONE = re.compile(r"-(medium-dark|medium-light|medium|light|dark)(-skin-tone)?(?=-|$)")
#: Names in which a tone word is part of the thing itself and no variant of another picture.
_NOT_A_TONE = re.compile(r"traffic-light|medium-(small-)?square|speaker-medium|^medium$|^(\w+-)?skin-tone$")


@dataclass(frozen=True)
class Icon:
    """One picture of the data set. ``split`` is ``train``, ``held_name`` or ``held_pair``."""

    name: str
    style: str
    split: str
    synonyms: tuple[str, ...]


def without_tone(name: str) -> str:
    """The icon's name with every skin-tone mark removed."""
    return name if _NOT_A_TONE.search(name) else _TONE.sub("", name)


def kept_name(name: str) -> str | None:
    """The caption name of an icon, or None for a skin-tone variant that the data set leaves out.

    Of each set of tone variants the neutral picture and the one in medium skin tone stay; the
    Fluent sets spell tones without the word "skin-tone".
    """
    if _NOT_A_TONE.search(name):
        return None if name.endswith("skin-tone") or name == "medium" else name
    tones = {match[0] for match in _TONE.findall(name)}
    if not tones:
        return name
    return f"{without_tone(name)}-medium-skin-tone" if tones == {"medium"} else None


def split_of(name: str, style: str) -> str:
    """Stable split of a picture: held out by name in every style, or in this style alone."""
    base = without_tone(name)
    if _unit_hash(f"name:{base}") < HELD_OUT_NAME_SHARE:
        return "held_name"
    styles = [word for _, word, _ in STYLES]
    chosen = styles[int(_unit_hash(f"style:{base}") * len(styles))]
    # One style in four is drawn a name, so four times the share of names gives the share of pairs.
    if style == chosen and _unit_hash(f"pair:{base}") < HELD_OUT_PAIR_SHARE * len(styles):
        return "held_pair"
    return "train"


def _unit_hash(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2.0**64


def icon_svg(icon: dict[str, Any], icon_set: dict[str, Any]) -> str:
    """A stand-alone SVG document from an Iconify body."""
    left, top = icon.get("left", 0), icon.get("top", 0)
    width = icon.get("width", icon_set.get("width", 16))
    height = icon.get("height", icon_set.get("height", 16))
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{left} {top} {width} {height}">{icon["body"]}</svg>'
    )


def render(svg: str, size: int) -> np.ndarray:
    """Renders an SVG on white. Returns [size, size, 3] uint8."""
    import resvg_py
    from PIL import Image

    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=size, height=size))
    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    canvas = Image.new("RGBA", (size, size), (255, 255, 255, 255))
    offset = ((size - picture.width) // 2, (size - picture.height) // 2)
    canvas.alpha_composite(picture, offset)
    return np.asarray(canvas.convert("RGB"))


def _render_job(job: tuple[str, int]) -> np.ndarray:
    return render(*job)


def load_synonyms(node_modules: Path) -> dict[str, tuple[str, ...]]:
    """Caption variants by icon name, from emojilib's keywords and the sets' code-point tables."""
    keywords = _read_json(node_modules / "emojilib/dist/emoji-en-US.json")
    by_name: dict[str, dict[str, None]] = {}
    for package, _, _ in STYLES:
        table = _read_json(node_modules / f"@iconify-json/{package}/chars.json")
        for code_points, name in table.items():
            char = "".join(chr(int(code, 16)) for code in code_points.split("-"))
            words = keywords.get(char) or keywords.get(char + "\ufe0f") or []
            for word in words:
                clean = str(word).replace("_", " ").strip().lower()
                if re.fullmatch(r"[a-z][a-z0-9 '&.-]{1,40}", clean):
                    by_name.setdefault(name, {})[clean] = None
    return {name: tuple(words) for name, words in by_name.items()}


def collect(node_modules: Path) -> Iterator[tuple[Icon, str]]:
    """Every picture that the data set keeps, with its SVG, in a stable order."""
    synonyms = load_synonyms(node_modules)
    for package, style, _ in STYLES:
        icon_set = _read_json(node_modules / f"@iconify-json/{package}/icons.json")
        seen: set[str] = set()
        for raw_name in sorted(icon_set["icons"]):
            name = kept_name(raw_name)
            if name is None or name in seen:
                continue
            seen.add(name)
            words = synonyms.get(raw_name) or synonyms.get(without_tone(name), ())
            icon = Icon(name, style, split_of(name, style), words)
            yield icon, icon_svg(icon_set["icons"][raw_name], icon_set)


def build(node_modules: Path, out: Path, size: int = 128, workers: int = 2) -> dict[str, Any]:
    """Renders the whole data set into ``out`` and returns its card.

    Raises:
        DataError: a package is missing; says which command installs it.
    """
    out.mkdir(parents=True, exist_ok=True)
    icons, svgs = zip(*collect(node_modules), strict=True)
    with ProcessPoolExecutor(workers) as pool:
        pictures = list(pool.map(_render_job, [(svg, size) for svg in svgs], chunksize=32))
    images = np.stack(pictures)
    np.save(out / "images.npy", images)
    (out / "captions.json").write_text(json.dumps([asdict(icon) for icon in icons]))
    card = {
        "pictures": len(icons),
        "names": len({icon.name for icon in icons}),
        "by_style": {style: sum(icon.style == style for icon in icons) for _, style, _ in STYLES},
        "by_split": {
            split: sum(icon.split == split for icon in icons) for split in ("train", "held_name", "held_pair")
        },
        "size": size,
        "packages": {package: _version(node_modules, f"@iconify-json/{package}") for package, _, _ in STYLES}
        | {"emojilib": _version(node_modules, "emojilib")},
        "licences": {package: licence for package, _, licence in STYLES} | {"emojilib": "MIT"},
        "images_sha256": hashlib.sha256(images.tobytes()).hexdigest(),
    }
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    return card


def _version(node_modules: Path, package: str) -> str:
    return str(_read_json(node_modules / package / "package.json")["version"])


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist. Install the picture packages first: "
            "npm install --prefix recipes/emoji, then pass --node-modules recipes/emoji/node_modules."
        ) from None
