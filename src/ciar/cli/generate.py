"""``ciar generate``: prompts in, pictures and their ledgers out.

Checks everything that can be checked before a model is loaded. Knows the pipeline by its call.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ciar.cli.output import note, printable, say, say_json
from ciar.cli.parser import Command, real, whole
from ciar.cli.paths import BESIDE, SUFFIXES, Target, check_writable, plan
from ciar.cli.progress import Progress
from ciar.cli.report import Made, describe, document
from ciar.errors import InputError
from ciar.planner.conditions import WISHES
from ciar.protocol.messages import option_value
from ciar.version import __version__

if TYPE_CHECKING:
    from PIL import Image

#: Seeds are unsigned 64-bit integers.
LARGEST_SEED = 2**64 - 1
TOKEN_VARIABLE = "CIAR_TOKEN"
#: Options that are recorded in the picture's file, beside prompt, seed and strategy.
_RECORDED = (
    "backbone",
    "device_model",
    "negative_prompt",
    "guidance",
    "temperature",
    "top_k",
    "top_p",
    "score",
    "threshold",
    "prefix_rate",
    "window",
    "action",
    "payload",
)

DESCRIPTION = """\
Draws pictures from prompts.

The pictures go to PNG files; who decided their tokens, and what that cost, to standard output.
The same prompt, seed and settings give the same tokens, alone or in a batch, with or without a
server. A picture's settings are kept in its PNG file: see "ciar inspect"."""

EPILOG = """\
examples:
  ciar generate "a smiling cat with sunglasses" --seed 7 --heatmap
  ciar generate "a red car" "a blue car" --n 4 --out pictures/
  ciar generate - --json < prompts.txt > ledgers.json
  ciar generate "a red car" --cloud wss://example.org:8765
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``ciar generate``. An option that is left out takes the backbone's default."""
    parser.add_argument(
        "prompt",
        nargs="*",
        help="what to draw, in quotes; - reads a prompt from every line of standard input",
    )
    picture = parser.add_argument_group("the picture")
    picture.add_argument("--negative-prompt", metavar="TEXT", help="what to steer away from")
    picture.add_argument(
        "--seed",
        type=whole(0, LARGEST_SEED),
        metavar="N",
        help="0 to 2**64 - 1 (default: drawn, and printed)",
    )
    picture.add_argument(
        "--n", type=whole(1, 1000), default=1, metavar="N", help="pictures of every prompt, 1 to 1000"
    )
    picture.add_argument(
        "--guidance",
        type=real(0.0),
        metavar="X",
        help="how closely to follow the prompt, >= 0; 1 = no guidance",
    )
    picture.add_argument(
        "--temperature", type=real(0.0), metavar="X", help=">= 0; 0 takes the most likely token"
    )
    picture.add_argument("--top-k", type=whole(0), metavar="N", help="tokens to choose from, 0 = all")
    picture.add_argument(
        "--top-p",
        type=real(0.0, 1.0, above=True),
        metavar="P",
        help="probability mass to choose from, in (0, 1]",
    )
    method = parser.add_argument_group("the method")
    method.add_argument(
        "--strategy",
        default="ciar",
        metavar="NAME",
        help='one of "ciar strategies", or auto: the planner chooses (default: ciar)',
    )
    method.add_argument(
        "--wish",
        choices=WISHES,
        help="what auto aims at: the cloud's own picture, a near one sooner, the least work for the cloud, "
        "or no cloud (default: balanced)",
    )
    method.add_argument(
        "--score",
        metavar="NAME",
        help='the gate, one of "ciar strategies --gates" (default: the backbone\'s)',
    )
    method.add_argument(
        "--threshold",
        type=real(0.0, infinite=True),
        metavar="X",
        help="the device keeps a token whose uncertainty score is at most this; inf keeps all",
    )
    method.add_argument(
        "--prefix-rate",
        type=real(0.0, 1.0),
        metavar="P",
        help="share of tokens that the cloud makes first, 0 to 1",
    )
    method.add_argument(
        "--window",
        type=whole(1, 1024),
        metavar="N",
        help="tokens a request of a windowed strategy, 1 to 1024",
    )
    method.add_argument(
        "--action",
        choices=("replace", "verify"),
        help="what the cloud does with an uncertain token: take its own, or check the device's",
    )
    method.add_argument(
        "--payload",
        choices=("ids", "features"),
        help="what travels: token ids alone, or interval features too",
    )
    method.add_argument(
        "--set",
        dest="options",
        action="append",
        type=_option,
        metavar="NAME=VALUE",
        help="an option of the strategy, see docs/strategies.md; may be given several times",
    )
    where = parser.add_argument_group("where it runs")
    where.add_argument(
        "--backbone", default="emoji", metavar="NAME", help="a name or a folder (default: emoji)"
    )
    where.add_argument(
        "--device-model", metavar="NAME", help="one of the backbone's device models (default: its own)"
    )
    where.add_argument(
        "--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1, mps (default: cpu)"
    )
    where.add_argument(
        "--cloud", type=_address, metavar="URL", help="a server: ws://host:port or wss://host:port"
    )
    where.add_argument("--token", metavar="TEXT", help=f"the server's token (default: ${TOKEN_VARIABLE})")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out", metavar="FILE|DIR", help="where to write (default: ciar-<prompt>-<seed>.png)"
    )
    output.add_argument(
        "--heatmap",
        nargs="?",
        const=BESIDE,
        metavar="FILE",
        help="also draw who decided each token (default: beside the picture)",
    )
    output.add_argument("--force", action="store_true", help="replace files that exist")
    output.add_argument("--json", action="store_true", help="one JSON document on standard output, no table")
    output.add_argument("--quiet", action="store_true", help="only the names of the files that were written")


def run(options: argparse.Namespace) -> int:
    """Draws the pictures. Returns 0.

    Raises:
        InputError: a prompt or a path cannot be used; nothing was generated.
    """
    if options.token is not None and options.cloud is None:
        raise InputError("--token is for a server. Add --cloud ws://host:port, or leave --token out.")
    if options.wish is not None and options.strategy != "auto":
        raise InputError("--wish is for --strategy auto. Add it, or leave --wish out.")
    prompts = read_prompts(options.prompt, options.heatmap)
    # 32 bits make short file names, and survive programs that read JSON numbers as doubles.
    seed = secrets.randbits(32) if options.seed is None else options.seed
    targets = plan(prompts, options.n, seed, options.out, options.heatmap)
    check_writable(targets, options.force)
    if options.strategy == "auto":
        from ciar.pipeline import check_wishes  # as slow to import as in load_pipeline

        check_wishes("auto", options.wish, options.window, dict(options.options or ()))
    progress = Progress(sys.stderr, len(targets), quiet=options.quiet)
    progress.message(f"loading {printable(options.backbone)} ...")
    made: list[Made] = []
    try:
        pipeline = load_pipeline(
            options.backbone,
            cloud=options.cloud,
            token=_token(options) if options.cloud else None,
            device=options.device,
            device_model=options.device_model,
        )
        # A prompt at a time: what is finished is on the disk whatever happens to the next one.
        for index, prompt in enumerate(prompts):
            first = index * options.n
            made += _draw(pipeline, prompt, seed, options, targets[first : first + options.n], progress)
            progress.finished = len(made)
    finally:
        progress.clear()
    if options.json:
        say_json(document(made))
    elif options.quiet:
        for path in (path for picture in made for path in (picture.file, picture.heatmap) if path):
            say(str(path))
    else:
        say(describe(made))
    if options.seed is None and (options.json or options.quiet or len(made) > 1):
        note(f"seed {seed} was drawn; pass --seed {seed} for the same pictures")
    return 0


def load_pipeline(
    backbone: str, *, cloud: str | None, token: str | None, device: str, device_model: str | None = None
) -> Any:
    """The pipeline; the import is what makes the command slow to start, so it is here."""
    from ciar.pipeline import Pipeline

    return Pipeline.from_pretrained(
        backbone, cloud=cloud, token=token, device=device, device_model=device_model
    )


def read_prompts(words: Sequence[str], heatmap: str | None = None) -> list[str]:
    """The prompts of a command line.

    Args:
        words: the positional arguments; ``-`` alone stands for the lines of standard input.
        heatmap: the value of ``--heatmap``, which may have swallowed the prompt.

    Raises:
        InputError: there is no prompt, or one is blank.
    """
    if not words:
        if heatmap and Path(heatmap).suffix.lower() not in SUFFIXES:
            raise InputError(
                f"There is no prompt: --heatmap took {printable(heatmap)!r} for its file name. "
                "Put the prompt before --heatmap, or write --heatmap=FILE."
            )
        raise InputError('There is no prompt. Say what to draw: ciar generate "a smiling cat".')
    if "-" in words:
        if len(words) > 1:
            raise InputError("- reads the prompts from standard input. Give it alone, or give only prompts.")
        return _stdin_prompts()
    for number, prompt in enumerate(words, 1):
        if not prompt.strip():
            raise InputError(f'Prompt {number} is empty. Say what to draw, for example "a smiling cat".')
    if len(words) > 1 and all(len(word.split()) == 1 for word in words):
        note(f"{len(words)} prompts of one word each; put quotes around a prompt of several words")
    return list(words)


def _stdin_prompts() -> list[str]:
    buffer = getattr(sys.stdin, "buffer", None)
    if buffer is None:
        raise InputError("Standard input is closed. Give the prompts as arguments, or pipe a file in.")
    try:
        text = buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"Standard input is not UTF-8 (byte {error.start}). Convert it first.") from None
    prompts = [line.strip() for line in io.StringIO(text, newline=None) if line.strip()]
    if not prompts:
        raise InputError("Standard input holds no prompt. Write one on each line.")
    return prompts


def _draw(
    pipeline: Any,
    prompt: str,
    seed: int,
    options: argparse.Namespace,
    targets: Sequence[Target],
    progress: Progress,
) -> list[Made]:
    """Draws and writes all pictures of one prompt."""
    output = pipeline(
        prompt,
        negative_prompt=options.negative_prompt,
        guidance_scale=options.guidance,
        num_images_per_prompt=len(targets),
        seed=seed,
        strategy=options.strategy,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        score=options.score,
        threshold=options.threshold,
        prefix_rate=options.prefix_rate,
        window=options.window,
        action=options.action,
        payload=options.payload,
        options=dict(options.options) if options.options else None,
        **({"wish": options.wish} if options.wish is not None else {}),
        callback_on_step_end=progress.step,
        output_type="pil",
    )
    if output.warnings:
        progress.clear()
        for warning in dict.fromkeys(output.warnings):
            note(f"warning: {printable(warning, 1000)}")
    planned = options.strategy == "auto"
    if planned:
        progress.clear()
        for why in dict.fromkeys(output.why if not options.quiet else ()):
            note(f"plan: {why}")
    made = [
        Made(
            prompt=prompt,
            seed=seed,
            image=i,
            strategy=output.strategies[i] if planned else options.strategy,
            tokens=output.tokens[i],
            file=target.picture,
            heatmap=target.heatmap,
            ledger=output.ledgers[i],
        )
        for i, target in enumerate(targets)
    ]
    for picture, image in zip(made, output.images, strict=True):
        plan = output.plans[picture.image][-1] if planned else None
        write_picture(picture.file, image, _settings(picture, options, plan))
        if picture.heatmap is not None:
            from ciar.evaluation.sheets import heatmap

            grid = round(len(picture.tokens) ** 0.5)
            write_picture(picture.heatmap, heatmap(image, list(picture.ledger.decided), grid))
    return made


def write_picture(path: Path, image: Image.Image, settings: dict[str, Any] | None = None) -> None:
    """Writes a picture whole or not at all; a PNG carries its settings in the text chunk ``ciar``.

    Raises:
        InputError: the disk is full, or the file cannot be written for another reason.
    """
    from PIL.PngImagePlugin import PngInfo

    extra: dict[str, Any] = {}
    if settings is not None and path.suffix.lower() == ".png":
        extra["pnginfo"] = PngInfo()
        extra["pnginfo"].add_itxt("ciar", json.dumps(settings))
    # The partial file keeps the ending, by which the format is chosen.
    partial = path.with_stem(f".{path.stem}.partial")
    try:
        image.convert("RGB").save(partial, **extra)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(
            f"{path} could not be written: {error.strerror or error}. Choose another --out."
        ) from None
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _settings(picture: Made, options: argparse.Namespace, plan: Any = None) -> dict[str, Any]:
    """What makes the same picture again; an option that was left out is not named.

    Args:
        plan: the plan that the picture ended by, where the planner chose.
    """
    given = {name: getattr(options, name) for name in _RECORDED if getattr(options, name) is not None}
    if given.get("threshold") == float("inf"):
        given["threshold"] = "inf"  # JSON has no infinity
    if options.options:
        given["options"] = dict(options.options)
    if plan is not None:
        given |= {"window": plan.window} if plan.window is not None else {}
        given |= {"options": given.get("options", {}) | dict(plan.options)} if plan.options else {}
    request = {"prompt": picture.prompt, "seed": picture.seed, "image": picture.image}
    return {"version": __version__} | request | {"strategy": picture.strategy} | given


def _token(options: argparse.Namespace) -> str | None:
    return options.token if options.token is not None else os.environ.get(TOKEN_VARIABLE) or None


def _option(text: str) -> tuple[str, int | float | str]:
    """An argparse type: name and value of an option; the strategy knows which names there are."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"give an option as NAME=VALUE, such as allowance=2, not {text!r}.")
    return name, option_value(value)


def _address(text: str) -> str:
    """An argparse type: a WebSocket address."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("ws", "wss") and bool(parts.hostname)
        _ = parts.port  # raises when it is no number from 0 to 65535
    except ValueError:
        usable = False
    if not usable:
        hint = " A server of ciar speaks WebSocket: write ws:// instead of http://." * text.startswith("http")
        raise argparse.ArgumentTypeError(f"give an address such as ws://127.0.0.1:8765, not {text!r}.{hint}")
    return text


COMMAND = Command(
    help="draw pictures from prompts",
    add_arguments=add_arguments,
    run=run,
    description=DESCRIPTION,
    epilog=EPILOG,
)
