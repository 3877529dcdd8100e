"""How fast the strategies are on this machine: ratios from one run, and where each millisecond goes.

All sides use the same weights, seeds and machine, warm, and take turns, so that drift of the machine
hits all alike; figures are medians over repeats. Text encoding and pixel decoding are included and
shown apart. The reference loop is how the model's authors sample: eager, a cache that grows by
concatenation, soft-max over the whole vocabulary and a multinomial draw.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ciar.models.bundle import Bundle
from ciar.models.gpt import GPT, rotate
from ciar.pipeline import Pipeline
from ciar.version import __version__

PROMPTS = (
    "a smiling cat with sunglasses",
    "red heart",
    "slice of pizza",
    "rocket",
    "sunflower",
    "blue car",
    "crying face",
    "birthday cake",
)
STRATEGIES = ("base", "ciar", "lossless", "device-only")


@dataclass
class BenchResult:
    """What a benchmark measured.

    Attributes:
        rows: by strategy, medians a picture: total and part times in ms, passes, uploads.
        reference_ms: the reference loop, ms a picture (no text, no pixels).
        cloud_step_ms: one cloud pass over one token.
        device_step_ms: one device step.
        peak_bytes: peak memory of ``ciar generate`` in a process of its own.
        pictures, repeats, threads: how it was measured.
        tokens: tokens of a picture.
    """

    rows: dict[str, dict[str, float]] = field(default_factory=dict)
    reference_ms: float = 0.0
    cloud_step_ms: float = 0.0
    device_step_ms: float = 0.0
    peak_bytes: int = 0
    pictures: int = 0
    repeats: int = 0
    threads: int = 0
    tokens: int = 0

    @property
    def ratios(self) -> dict[str, float]:
        """The claims, as ratios from this run."""
        base = self.rows["base"]
        return {
            "base_over_reference_tokens_per_s": self.reference_ms / base["loop_ms"],
            "device_step_over_cloud_step": self.device_step_ms / self.cloud_step_ms,
            **{
                f"{name}_speedup_over_base": base["total_ms"] / row["total_ms"]
                for name, row in self.rows.items()
                if name != "base"
            },
        }

    def to_dict(self) -> dict[str, Any]:
        """One JSON document."""
        return {
            "version": __version__,
            "machine": platform.machine(),
            "torch": torch.__version__,
            **{k: v for k, v in self.__dict__.items() if k != "rows"},
            "strategies": self.rows,
            "ratios": self.ratios,
        }

    def table(self) -> str:
        """For people."""
        columns = (
            "total_ms",
            "text_ms",
            "cloud_ms",
            "device_ms",
            "other_ms",
            "pixels_ms",
            "passes",
            "uploads",
        )
        lines = [f"{'strategy':12s}" + "".join(f"{name:>11s}" for name in columns)]
        for name, row in self.rows.items():
            lines.append(f"{name:12s}" + "".join(f"{row[column]:11.2f}" for column in columns))
        lines.append("")
        lines += [f"{name.replace('_', ' '):40s}{value:8.2f}" for name, value in self.ratios.items()]
        lines.append(f"{'cloud step, ms':40s}{self.cloud_step_ms:8.2f}")
        lines.append(f"{'device step, ms':40s}{self.device_step_ms:8.2f}")
        lines.append(f"{'reference loop, ms a picture':40s}{self.reference_ms:8.1f}")
        lines.append(f"{'peak memory of ciar generate, MB':40s}{self.peak_bytes / 1e6:8.0f}")
        return "\n".join(lines)


def bench(
    backbone: str = "emoji",
    *,
    device: str = "cpu",
    pictures: int = 4,
    repeats: int = 3,
    seed: int = 0,
    threads: int | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Runs the benchmark in this process, and one ``ciar generate`` in another for its memory.

    Raises:
        InputError: there is no such backbone or device.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    pipe = Pipeline.from_pretrained(backbone, device=device)
    result = BenchResult(
        pictures=pictures, repeats=repeats, threads=torch.get_num_threads(), tokens=pipe.bundle.total
    )
    note("warming up")
    for strategy in STRATEGIES:
        pipe(PROMPTS[0], seed=seed, strategy=strategy)
    reference_loop(pipe.bundle, PROMPTS[0], seed)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in STRATEGIES}
    reference: list[float] = []
    for repeat in range(repeats):
        for i in range(pictures):
            prompt = PROMPTS[i % len(PROMPTS)]
            for strategy in STRATEGIES:
                samples[strategy].append(_one(pipe, prompt, seed + i, strategy))
            began = time.perf_counter()
            reference_loop(pipe.bundle, prompt, seed + i)
            reference.append((time.perf_counter() - began) * 1e3)
        note(f"repeat {repeat + 1} of {repeats}")
    for name, rows in samples.items():
        result.rows[name] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    result.reference_ms = statistics.median(reference)
    base = result.rows["base"]
    result.cloud_step_ms = base["cloud_ms"] / base["passes"]
    alone = result.rows["device-only"]
    result.device_step_ms = alone["device_ms"] / result.tokens
    result.peak_bytes = peak_memory(backbone, seed)
    return result


def _one(pipe: Pipeline, prompt: str, seed: int, strategy: str) -> dict[str, float]:
    ledger = pipe(prompt, seed=seed, strategy=strategy).ledgers[0]
    spent = ledger.text_ms + ledger.cloud_ms + ledger.device_ms + ledger.pixels_ms
    return {
        "total_ms": ledger.total_ms,
        "text_ms": ledger.text_ms,
        "cloud_ms": ledger.cloud_ms,
        "device_ms": ledger.device_ms,
        "other_ms": ledger.total_ms - spent,
        "pixels_ms": ledger.pixels_ms,
        "loop_ms": ledger.total_ms - ledger.text_ms - ledger.pixels_ms,
        "passes": float(ledger.cloud_passes),
        "rows": float(ledger.token_rows),
        "uploads": ledger.upload_share,
    }


@torch.inference_mode()
def reference_loop(bundle: Bundle, prompt: str, seed: int) -> list[int]:
    """Plain eager sampling as the model's authors do it; returns the tokens."""
    model: GPT = bundle.gpt
    config, defaults = model.config, bundle.defaults
    text = bundle.text.encode(prompt)
    valid = int(text.mask.sum())
    null = model.cls_embedding.uncond_embedding.to(text.features)
    rows = torch.stack([text.features[-valid:], null[-valid:]]).to(model.tok_embeddings.weight)
    generator = torch.Generator(device=rows.device).manual_seed(seed)
    cache: list[tuple[Tensor, Tensor] | None] = [None] * config.n_layer
    x = model.embed_text(rows)
    start = config.text_len - valid
    tokens: list[int] = []
    for _ in range(config.tokens):
        n = x.shape[1]
        for i, block in enumerate(model.blocks):
            h = block.attention_norm(x)
            q, k, v = block.attention.wqkv(h).unflatten(-1, (3, config.n_head, -1)).permute(2, 0, 3, 1, 4)
            table = model.table[start : start + n]
            q, k = rotate(q, table), rotate(k, table)
            before = cache[i]
            if before is not None:
                k, v = torch.cat([before[0], k], dim=2), torch.cat([before[1], v], dim=2)
            cache[i] = (k, v)
            x = block.finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=n > 1))
        conditional, unconditional = model.head(model.norm(x[:, -1]))
        logits = unconditional + defaults.guidance * (conditional - unconditional)
        if defaults.top_k:
            logits[logits < logits.topk(defaults.top_k).values[-1]] = -torch.inf
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens.append(int(token))
        start += n
        x = model.embed_tokens(token.expand(2, 1))
    return tokens


def peak_memory(backbone: str, seed: int) -> int:
    """Peak resident bytes of a whole ``ciar generate`` in a process of its own."""
    # Not ru_maxrss alone: on Linux a new program inherits its parent's, and this process is large.
    code = (
        "import pathlib, resource, sys\n"
        "from ciar.pipeline import Pipeline\n"
        f"Pipeline.from_pretrained({backbone!r})({PROMPTS[0]!r}, seed={seed})\n"
        "status = pathlib.Path('/proc/self/status')\n"
        "lines = status.read_text().splitlines() if status.exists() else []\n"
        "own = [line.split()[1] for line in lines if line.startswith('VmHWM:')]\n"
        "print(own[0] if own else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    unit = 1 if sys.platform == "darwin" else 1024  # in bytes on macOS, in KiB elsewhere
    return int(done.stdout.split()[-1]) * unit
