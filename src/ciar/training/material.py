"""Prompts and pictures that a backbone folder's device model learns from: given ones, or the cloud's own."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from ciar.decoding.batch import Batch
from ciar.decoding.strategy import get_strategy
from ciar.errors import CheckpointError, DataError
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.bundle import Bundle
from ciar.models.family import CloudModel, Sizes
from ciar.models.text import TextEncoder, check_prompt, cut_prompt
from ciar.models.text_features import FeatureSource, PrecomputedTextEncoder, prompt_key, write_features
from ciar.models.text_kinds import open_features
from ciar.models.vq import from_uint8
from ciar.protocol.messages import Settings
from ciar.training.bank import Captions
from ciar.training.caches import Cache

#: Says what is being done.
Say = Callable[[str], None]
_PICTURES = (".png", ".jpg", ".jpeg", ".webp")
#: Pictures that the image tokenizer encodes at a time.
_ENCODED = 8
#: Prompts that a large text encoder reads before their features are written down, and the share of those
#: that are there already: each time all are written, so that their number has to grow with them.
_READ, _READ_SHARE = 64, 8
_ROOM = "choose another folder with --work"


def read_prompts(path: Path) -> list[str]:
    """One prompt from every line of a file; empty lines are left out.

    Raises:
        DataError: the file cannot be read, or holds no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}). Pass a text file, one prompt a line.") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise DataError(f"{path} holds no prompt. Write one on every line.")
    return prompts


def text_encoder(
    bundle: Bundle,
    features: Path | None,
    prompts: Sequence[str],
    work: Path,
    say: Say = lambda words: None,
) -> TextEncoder:
    """What reads the prompts: features that were made beforehand, or the backbone's own text encoder.

    An encoder of gigabytes runs once over all prompts; its features are kept in ``work``, some prompts at
    a time, and a second call goes on there.

    Raises:
        CheckpointError: the features are of another encoder, or the backbone has none.
    """
    if features is not None:
        return open_features(features, bundle.text_config)
    config = bundle.text_config
    if config.kind != "t5":
        return bundle.text
    folder = work / "text"
    source = FeatureSource(config.encoder, config.text_len, config.caption_dim, config.dtype)
    wanted = list(dict.fromkeys(cut_prompt(check_prompt(prompt))[0] for prompt in prompts))
    kept = _kept_features(folder, source)
    while missing := [one for one in wanted if kept is None or prompt_key(one) not in kept.entries]:
        part = missing[: max(_READ, 0 if kept is None else len(kept.entries) // _READ_SHARE)]
        write_features(folder, source, ((prompt, bundle.text.encode(prompt)) for prompt in part))
        kept = PrecomputedTextEncoder(folder)
        say(f"{len(wanted) - len(missing) + len(part)} of {len(wanted)} prompts read")
    assert kept is not None, "there is a prompt"
    return kept


def _kept_features(folder: Path, source: FeatureSource) -> PrecomputedTextEncoder | None:
    """Features of an earlier call; those of another encoder, or that a stop left damaged, are removed."""
    if not (folder / "features.json").is_file():
        return None
    with suppress(CheckpointError):
        kept = PrecomputedTextEncoder(folder)
        if kept.source == source:
            return kept
    shutil.rmtree(folder)
    return None


def given_codes(path: Path, count: int, sizes: Sizes) -> Tensor:
    """Codes of a file of NumPy, int64 [count, tokens]; row i is the picture of prompt i.

    Raises:
        DataError: the file cannot be read, or does not belong to the prompts or the model.
    """
    try:
        codes = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is no array of NumPy ({error}). Save codes with numpy.save.") from None
    if not isinstance(codes, np.ndarray):
        raise DataError(f"{path} holds several arrays. Save the codes alone, with numpy.save.")
    if codes.ndim != 2 or codes.dtype.kind not in "iu" or codes.shape != (count, sizes.tokens):
        raise DataError(
            f"{path} holds {codes.dtype} of {list(codes.shape)}, and {count} prompts need whole numbers of "
            f"[{count}, {sizes.tokens}]: a row of codes for each prompt."
        )
    if codes.size and not 0 <= int(codes.min()) <= int(codes.max()) < sizes.vocab_size:
        raise DataError(
            f"{path} holds codes from {codes.min()} to {codes.max()}; the image tokenizer has 0 to "
            f"{sizes.vocab_size - 1}. Use its own codes."
        )
    return torch.from_numpy(codes.astype(np.int64))


def captioned_pictures(folder: Path) -> tuple[list[Path], list[str]]:
    """Pictures of a folder and the captions beside them, ``fox.png`` and ``fox.txt``, by name.

    Raises:
        DataError: there are none, or a caption is missing.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder. Pass one with pictures and their captions.")
    pictures = sorted(path for path in folder.iterdir() if path.suffix.lower() in _PICTURES)
    lost = [path.name for path in pictures if not path.with_suffix(".txt").is_file()]
    if not pictures or lost:
        what = f"no caption beside {', '.join(lost[:3])}" if lost else f"no {', '.join(_PICTURES)} file"
        raise DataError(f"{folder} has {what}. Each picture needs its caption, as fox.png and fox.txt.")
    return pictures, [" ".join(read_prompts(path.with_suffix(".txt"))) for path in pictures]


@torch.inference_mode()
def encoded_pictures(bundle: Bundle, pictures: Sequence[Path], out: Path, weights: str = "") -> Tensor:
    """Codes of pictures, int64 [pictures, tokens]: scaled and cropped to a square about the middle.

    Args:
        out: folder of ``codes.npy``, which grows by a few pictures at a time. A second call goes on there,
            as long as names, sizes and times of the files are the same.
        weights: digest of the image tokenizer's weights.

    Raises:
        DataError: a picture cannot be read.
        InputError: the backbone's image tokenizer has no encoder.
    """
    vq, edge = bundle.vq, bundle.vq_config.image_size
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in pictures]
    told = json.dumps([files, edge, bundle.vq_config.to_dict(), weights])
    shape = (len(pictures), bundle.gpt_config.tokens)
    cache = Cache(out, "codes.json", _key(told), {"codes": (np.uint16, shape)}, _ROOM)
    codes = cache.arrays["codes"]
    for start in range(cache.done, len(pictures), _ENCODED):
        part = slice(start, min(start + _ENCODED, len(pictures)))
        pixels = np.stack([_square(path, edge) for path in pictures[part]])
        made = vq.encode(from_uint8(torch.from_numpy(pixels)).to(bundle.device))
        codes[part] = made.flatten(1).cpu().numpy().astype(np.uint16)
        cache.filled(part.stop)
    return torch.from_numpy(np.asarray(codes).astype(np.int64))


def _key(told: str) -> str:
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _square(path: Path, edge: int) -> np.ndarray:
    """Pixels as the picture is looked at: turned as it says, and on white where it is transparent."""
    try:
        with Image.open(path) as picture:
            upright = ImageOps.exif_transpose(picture)
            if upright.has_transparency_data:
                shown = upright.convert("RGBA")
                upright = Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown)
            colours = upright.convert("RGB")
    except Image.DecompressionBombError as error:
        raise DataError(f"{path} has too many pixels ({error}). Scale it down first.") from None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path} is no readable picture ({error}). Take it out of the folder.") from None
    scale = edge / min(colours.size)
    width, height = (max(edge, round(side * scale)) for side in colours.size)
    left, top = (width - edge) // 2, (height - edge) // 2
    scaled = colours.resize((width, height), Image.Resampling.LANCZOS)
    return np.asarray(scaled.crop((left, top, left + edge, top + edge)))


def drawn_codes(
    cloud: CloudModel,
    captions: Captions,
    prompts: Sequence[str],
    settings: Settings,
    out: Path,
    *,
    weights: str = "",
    batch: int = 8,
    say: Say = lambda words: None,
) -> Tensor:
    """Codes that the cloud draws itself, int64 [prompts, tokens]; goes on where it stopped.

    Args:
        settings: of ``base``; picture i has seed ``settings.seed + i``.
        out: folder of ``codes.npy``, which grows by a batch at a time.
        weights: digest of the cloud's weights.
        batch: pictures made at a time.
    """
    count, tokens = len(prompts), cloud.config.tokens
    told = json.dumps([list(prompts), asdict(settings), weights, cloud.config.to_dict()], sort_keys=True)
    cache = Cache(out, "codes.json", _key(told), {"codes": (np.uint16, (count, tokens))}, _ROOM)
    codes = cache.arrays["codes"]
    open_gate = ThresholdConfig(kind="fixed", value=0.0)
    for start in range(cache.done, count, batch):
        numbers = range(start, min(start + batch, count))
        features, mask = captions.mixed(numbers)
        own = [replace(settings, seed=settings.seed + i) for i in numbers]
        gates = [open_gate.start(tokens) for _ in own]
        made = Batch(cloud, None, features, mask, own, get_strategy("base"), list(gates)).run()
        codes[numbers.start : numbers.stop] = np.array([picture.tokens for picture in made], np.uint16)
        cache.filled(numbers.stop)
        say(f"{numbers.stop} of {count} pictures drawn by the cloud model")
    return torch.from_numpy(np.asarray(codes).astype(np.int64))
