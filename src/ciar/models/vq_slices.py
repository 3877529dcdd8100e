"""The wide layers of a VQ tokenizer in slices of rows: same numbers, a fraction of the memory.

A group norm needs its mean and variance over the whole picture, and a 3 x 3 convolution one row more
on either side; nothing else reaches across rows. So the statistics are taken first, and then each
slice of rows is normalised, activated and convolved by itself. Only for inference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: A layer that makes more numbers than this is made in slices of at most about as many: every layer of
#: a 128 px picture is below it.
SLICE_NUMBERS = 1 << 22


def worth_slicing(numbers: int) -> bool:
    """Whether a layer that makes so many numbers is made in slices."""
    return numbers > SLICE_NUMBERS and not torch.is_grad_enabled()


def _slices(rows: int, numbers_a_row: int) -> Iterator[tuple[int, int]]:
    step = max(8, SLICE_NUMBERS // numbers_a_row)
    for low in range(0, rows, step):
        yield low, min(low + step, rows)


def _activated(norm: nn.GroupNorm, x: Tensor) -> Callable[[Tensor], Tensor]:
    """Group norm with the statistics of the whole of ``x``, and SiLU, for slices of it."""
    batch, channels = x.shape[:2]
    grouped = x.reshape(batch, norm.num_groups, -1)
    variance, mean = torch.var_mean(grouped, dim=-1, correction=0)  # [batch, groups]
    each = channels // norm.num_groups
    scale = (variance + norm.eps).rsqrt().repeat_interleave(each, dim=1) * norm.weight
    shift = norm.bias - mean.repeat_interleave(each, dim=1) * scale
    scale, shift = scale[:, :, None, None], shift[:, :, None, None]
    return lambda part: F.silu(torch.addcmul(shift, part, scale), inplace=True)


def _conv(conv: nn.Conv2d, part: Tensor, top: bool, bottom: bool) -> Tensor:
    """A 3 x 3 convolution of rows with their neighbours; ``top`` and ``bottom`` are the picture's edges."""
    return F.conv2d(F.pad(part, (1, 1, int(top), int(bottom))), conv.weight, conv.bias)


def norm_conv(norm: nn.GroupNorm, conv: nn.Conv2d, x: Tensor) -> Tensor:
    """``conv(silu(norm(x)))``, [batch, channels, rows, columns]; ``x`` is left as it is."""
    batch, channels, rows, columns = x.shape
    act = _activated(norm, x)
    made = x.new_empty(batch, conv.out_channels, rows, columns)
    for low, high in _slices(rows, batch * max(channels, conv.out_channels) * columns):
        begin, end = max(low - 1, 0), min(high + 1, rows)
        made[:, :, low:high] = _conv(conv, act(x[:, :, begin:end]), low == 0, high == rows)
    return made


def norm_conv_add(
    norm: nn.GroupNorm, conv: nn.Conv2d, h: Tensor, x: Tensor, shortcut: nn.Conv2d | None
) -> Tensor:
    """``conv(silu(norm(h)))`` plus ``x``, or its shortcut, written over ``h``.

    What the next slice still needs of what was overwritten is one row.
    """
    rows, columns = h.shape[2:]
    act = _activated(norm, h)
    above: Tensor | None = None
    for low, high in _slices(rows, h.shape[0] * max(h.shape[1], x.shape[1]) * columns):
        end = min(high + 1, rows)
        part = h[:, :, low:end] if above is None else torch.cat([above, h[:, :, low:end]], dim=2)
        made = _conv(conv, act(part), low == 0, high == rows)
        straight = x[:, :, low:high]
        made += straight if shortcut is None else F.conv2d(straight, shortcut.weight, shortcut.bias)
        above = h[:, :, high - 1 : high].clone()
        h[:, :, low:high] = made
    return h


def doubled_conv(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """A 3 x 3 convolution of ``x`` with every pixel doubled: [batch, channels, 2 rows, 2 columns]."""
    batch, channels, rows, columns = x.shape
    out = x.new_empty(batch, conv.out_channels, 2 * rows, 2 * columns)
    for low, high in _slices(rows, 4 * batch * max(channels, conv.out_channels) * columns):
        begin, end = max(low - 1, 0), min(high + 1, rows)
        wide = F.interpolate(x[:, :, begin:end], scale_factor=2.0, mode="nearest")
        # One of the two rows that a neighbour became is enough.
        wide = wide[:, :, int(low > 0) : wide.shape[2] - int(high < rows)]
        out[:, :, 2 * low : 2 * high] = _conv(conv, wide, low == 0, high == rows)
    return out
