"""What one picture costs on a backbone of full size: time of a pass, memory, and the picture itself.

For models of which a benchmark with repeats would take hours. A pass over one token reads every weight
once and computes little, so its time is set beside that of a plain copy of the weights, made in the same
run: the ratio says how far the engine is from what the memory allows.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ciar.bench import PROMPTS
from ciar.cloud.engine import CloudEngine
from ciar.cloud.sessions import Cloud
from ciar.decoding.strategy import Pass, get_strategy
from ciar.errors import InputError
from ciar.ledger import Ledger
from ciar.models.bundle import Bundle, check_device
from ciar.models.family import CloudModel
from ciar.models.inference import InferenceGPT
from ciar.models.loading.open import open_bundle
from ciar.models.matrix import Matrix
from ciar.models.text_features import PrecomputedTextEncoder
from ciar.pipeline import Pipeline
from ciar.transport.inprocess import InProcessTransport
from ciar.version import __version__

#: Tokens of the passes that are timed.
WIDTHS = (1, 16, 64)
STRATEGIES = ("base", "ciar")


@dataclass
class Picture:
    """One picture, or as much of it as was asked for.

    Attributes:
        tokens: of the picture that were made.
        seconds: all of it; pixels only where the picture is whole.
        passes, token_rows, uploads: as in the ledger.
        peak_bytes: most memory that the process has had so far.
    """

    tokens: int
    seconds: float
    passes: int
    token_rows: int
    uploads: float
    peak_bytes: int


@dataclass
class Footprint:
    """What was measured.

    Attributes:
        backbone, dtype, device, threads: of what, and how.
        total: tokens of a whole picture.
        weight_bytes: weights that a pass reads, as they lie in memory.
        copy_ms: time of a plain copy of them.
        pass_ms: by tokens, median time of a pass, both rows of guidance in it.
        pictures: by strategy.
        cache_bytes: keys and values of one picture.
    """

    backbone: str
    dtype: str
    device: str
    threads: int
    total: int
    weight_bytes: int
    copy_ms: float
    pass_ms: dict[int, float]
    cache_bytes: int
    pictures: dict[str, Picture] = field(default_factory=dict)

    @property
    def pass_over_copy(self) -> float:
        """Time of a pass over one token, in copies of the weights."""
        return self.pass_ms[1] / self.copy_ms

    def to_dict(self) -> dict[str, Any]:
        """One JSON document."""
        machine = {"version": __version__, "machine": platform.machine(), "torch": torch.__version__}
        return machine | asdict(self) | {"pass_over_copy": self.pass_over_copy}

    def table(self) -> str:
        """For people."""
        lines = [f"{self.backbone} in {self.dtype} on {self.device}, {self.threads} threads"]
        lines.append(f"{'weights that a pass reads, GB':40s}{self.weight_bytes / 1e9:10.2f}")
        lines.append(f"{'keys and values of a picture, GB':40s}{self.cache_bytes / 1e9:10.2f}")
        lines.append(f"{'a plain copy of the weights, ms':40s}{self.copy_ms:10.1f}")
        lines += [f"{f'a pass over {n}, ms':40s}{value:10.1f}" for n, value in self.pass_ms.items()]
        lines.append(f"{'a pass over 1, in copies':40s}{self.pass_over_copy:10.2f}")
        lines.append("")
        head = ("tokens", "seconds", "passes", "rows", "uploads", "peak GB")
        lines.append(f"{'strategy':12s}" + "".join(f"{name:>10s}" for name in head))
        for name, one in self.pictures.items():
            values = f"{one.tokens:10d}{one.seconds:10.1f}{one.passes:10d}{one.token_rows:10d}"
            lines.append(f"{name:12s}{values}{one.uploads:10.2f}{one.peak_bytes / 1e9:10.2f}")
        return "\n".join(lines)


def footprint(
    backbone: str,
    *,
    device: str = "cpu",
    strategies: Sequence[str] = STRATEGIES,
    tokens: int | None = None,
    repeats: int = 5,
    seed: int = 0,
    threads: int | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Footprint:
    """Measures a backbone in this process.

    Args:
        strategies: which make a picture each.
        tokens: the picture is broken off there; None makes it whole.
        repeats: of every pass and of the copy.

    Raises:
        InputError: there is no such backbone, device or strategy.
        CheckpointError: a strategy needs a device model, and the backbone has none.
    """
    for name in strategies:
        get_strategy(name)
    check_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    bundle = open_bundle(backbone, None, device)
    if bundle.total < 2:
        raise InputError(f"{bundle.name} makes pictures of one token, and there is nothing to measure.")
    prompt = _prompt(bundle)
    note("loading")
    cloud = Cloud(bundle)
    pipe = Pipeline(bundle, InProcessTransport(cloud))
    read = weights_read(cloud.engine.model, bundle.model)
    note("timing passes")
    pass_ms, cache_bytes = _passes(cloud.engine, bundle, prompt, repeats)
    result = Footprint(
        backbone=bundle.name,
        dtype=str(bundle.dtype).removeprefix("torch."),
        device=device,
        threads=torch.get_num_threads(),
        total=bundle.total,
        weight_bytes=sum(weight.nbytes for weight in read),
        copy_ms=_copy_ms(read, repeats),
        pass_ms=pass_ms,
        cache_bytes=cache_bytes,
    )
    for name in strategies:
        note(f"making a picture by {name}")
        result.pictures[name] = _picture(pipe, prompt, name, seed, tokens)
    return result


def weights_read(model: CloudModel, stored: nn.Module) -> list[Tensor]:
    """What a pass reads of the cloud model's weights: a row of the token table, none of the caption part.

    Args:
        model: as it is decoded with, which may keep its matrices in another type than they are stored in.
        stored: the same as it is stored.

    Returns:
        Tensors of that size which lie in memory.
    """
    if not isinstance(model, InferenceGPT):
        named = stored.named_parameters()
        return [weight.detach() for name, weight in named if "embed" not in name and "null" not in name]
    parts: list[Any] = [*(part for layer in model.layers for part in layer), model.norm, model.output]
    return [part.in_memory() if isinstance(part, Matrix) else part for part in parts if part is not None]


def _prompt(bundle: Bundle) -> str:
    encoder = bundle.text
    if isinstance(encoder, PrecomputedTextEncoder):
        return next((str(entry["prompt"]) for entry in encoder.entries.values()), PROMPTS[0])
    return PROMPTS[0]


def _passes(engine: CloudEngine, bundle: Bundle, prompt: str, repeats: int) -> tuple[dict[int, float], int]:
    text = bundle.text.encode(prompt)
    slot = engine.open(text, None, bundle.defaults.guidance, text)
    out: dict[int, float] = {}
    for width in sorted({min(width, bundle.total) for width in WIDTHS}):
        work = partial(engine.run, slot, Pass(0, [0] * width, want=1))
        work()  # pages are read when they are first touched
        out[width] = statistics.median(_clock(work, bundle.device) for _ in range(repeats))
    return out, slot.cache.nbytes


def _copy_ms(tensors: Sequence[Tensor], repeats: int) -> float:
    largest = max(tensors, key=lambda tensor: tensor.nbytes)
    buffer = torch.empty(largest.nbytes, dtype=torch.uint8, device=largest.device)

    def copy() -> None:
        for tensor in tensors:
            buffer[: tensor.nbytes].copy_(tensor.flatten().view(torch.uint8))

    copy()
    return statistics.median(_clock(copy, largest.device) for _ in range(repeats))


def _clock(work: Callable[[], object], device: torch.device) -> float:
    """Milliseconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) * 1e3


def _picture(pipe: Pipeline, prompt: str, strategy: str, seed: int, tokens: int | None) -> Picture:
    limit = pipe.bundle.total if tokens is None else min(tokens, pipe.bundle.total)
    last: list[tuple[int, Ledger]] = []

    def watch(_: Pipeline, done: int, info: dict[str, Any]) -> bool | None:
        last[:] = [(done, info["ledger"])]
        return False if limit < pipe.bundle.total and done >= limit else None

    began = time.perf_counter()
    out = pipe(prompt, seed=seed, strategy=strategy, callback_on_step_end=watch)
    seconds = time.perf_counter() - began
    made, ledger = (pipe.bundle.total, out.ledgers[0]) if out.ledgers else last[0]
    decided = ledger.decided
    asked = sum(who not in ("device", "prefix") for who in decided)
    return Picture(
        tokens=made,
        seconds=seconds,
        passes=ledger.cloud_passes,
        token_rows=ledger.token_rows,
        uploads=ledger.upload_share if out.ledgers else asked / max(len(decided), 1),
        peak_bytes=peak_bytes(),
    )


def peak_bytes() -> int:
    """Most bytes that this process has had in memory; mapped files count as far as they were touched."""
    # Not ru_maxrss alone: on Linux a new program inherits its parent's.
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    own = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    if own:
        return int(own[0]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
