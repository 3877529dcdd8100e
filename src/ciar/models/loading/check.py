"""Is a checkpoint the right one? Every point that the formats' descriptions only infer is asserted here.

The weights of the two stages have the same shapes, and so have the tokenizers of the text and of the
class models: there only the file's name and the trainer's arguments tell them apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

import torch

from ciar.errors import CheckpointError, InputError
from ciar.models.chameleon import ChameleonConfig
from ciar.models.checkpoint import check_fit, misfits
from ciar.models.loading.chameleon_check import check_chameleon
from ciar.models.loading.layout import DESCRIPTIONS, PARTS, Part, Stored, quantised, read
from ciar.models.loading.read import Opened
from ciar.models.presets import PRESETS, Preset

NULL_CAPTION = "cls_embedding.uncond_embedding"


def shapes(tensors: Mapping[str, Stored]) -> dict[str, list[int]]:
    """Name to shape."""
    return {name: list(value.shape) for name, value in tensors.items()}


def fitting(part: Part) -> list[str]:
    """Names of the presets that a transformer or a tokenizer fits exactly."""
    found = shapes(part.tensors)
    return [preset.name for preset in _of_family(part) if not misfits(expected(preset, part), found)]


def _of_family(part: Part) -> list[Preset]:
    """The presets of a part's family."""
    family = PARTS[part.kind][0] if part.kind in PARTS else None
    return [preset for preset in PRESETS.values() if preset.family_name == family]


def expected(preset: Preset, part: Part) -> Mapping[str, list[int]]:
    """Names and shapes that a part of a preset should have."""
    if PARTS[part.kind][1] == "vq":
        return preset.vq_shapes
    return preset.stored_shapes if part.layout == "ciar" else preset.gpt_shapes


def nearest(part: Part) -> Preset | None:
    """The preset that most tensors fit; None when not even half of them do."""
    found = shapes(part.tensors)

    def agreeing(preset: Preset) -> float:
        own = expected(preset, part)
        return sum(found.get(name) == shape for name, shape in own.items()) / len(own)

    near = _of_family(part)
    if not near:
        return None
    best = max(near, key=agreeing)
    return best if agreeing(best) >= 0.5 else None


def sizes(part: Part) -> dict[str, int]:
    """What the shapes say of a transformer or a tokenizer; only what they say."""
    found = shapes(part.tensors)
    out: dict[str, int] = {}
    if part.kind in ("chameleon", "chameleon-vq"):
        return _chameleon_sizes(part.kind == "chameleon", found)
    if part.kind == "gpt":
        layers = {int(m[1]) for name in found if (m := re.match(r"layers\.(\d+)\.", name))}
        out["layers"] = len(layers)
        for name, key, axis in (
            ("tok_embeddings.weight", "dim", 1),
            ("tok_embeddings.weight", "codes", 0),
            ("layers.0.feed_forward.w1.weight", "ffn_hidden", 0),
            (NULL_CAPTION, "text_len", 0),
            (NULL_CAPTION, "caption_dim", 1),
        ):
            if len(found.get(name, [])) == 2:
                out[key] = found[name][axis]
    elif part.kind == "vq":
        levels = {int(m[1]) for name in found if (m := re.match(r"decoder\.conv_blocks\.(\d+)\.", name))}
        out["levels"] = len(levels)
        if len(found.get("quantize.embedding.weight", [])) == 2:
            out["codes"], out["embed_dim"] = found["quantize.embedding.weight"]
    return out


def _chameleon_sizes(transformer: bool, found: dict[str, list[int]]) -> dict[str, int]:
    pattern = r"model\.layers\.(\d+)\." if transformer else r"decoder\.up\.(\d+)\."
    depth = len({int(m[1]) for name in found if (m := re.match(pattern, name))})
    out = {"layers" if transformer else "levels": depth}
    table = "model.embed_tokens.weight" if transformer else "quantize.embedding.weight"
    wanted = [
        (table, "text_tokens" if transformer else "codes", 0),
        (table, "dim" if transformer else "embed_dim", 1),
        ("model.layers.0.mlp.gate_proj.weight", "ffn_hidden", 0),
        ("model.layers.0.self_attn.q_norm.weight", "heads", 0),
    ]
    return out | {key: found[name][axis] for name, key, axis in wanted if len(found.get(name, [])) == 2}


def stage_of(opened: Opened) -> int | None:
    """The training stage that the trainer's arguments or else the file's name tell; None if neither."""
    size = opened.arguments.get("image_size")
    for preset in PRESETS.values():
        if preset.stage and size == preset.vq.image_size:
            return preset.stage
    named = re.search(r"stage[-_]?(\d)", opened.path.name.lower())
    return int(named[1]) if named else None


def choose_preset(opened: Opened, part: Part, wanted: str | None) -> Preset:
    """The preset that a transformer is loaded as.

    Raises:
        InputError: the preset is not known, or several fit and none is named.
        CheckpointError: the preset that is named does not fit, or none does.
    """
    if wanted is not None and wanted not in PRESETS:
        raise InputError(f"There is no preset {wanted!r}. Known: {', '.join(PRESETS)}.")
    stage = stage_of(opened)
    if wanted is not None:
        preset = PRESETS[wanted]
        if stage is not None and preset.stage not in (0, stage):
            right = [name for name, other in PRESETS.items() if other.stage == stage]
            raise CheckpointError(
                f"{opened.path} is of stage {stage} by its name or its trainer's arguments, and {wanted} is "
                f"of stage {preset.stage}. Use --preset {right[0] if right else 'of that stage'}, or rename "
                "the file if its name is wrong."
            )
        return preset
    fits = fitting(part)
    told = [name for name in fits if PRESETS[name].stage == stage] or fits
    if len(told) == 1:
        return PRESETS[told[0]]
    if told:
        raise InputError(
            f"{opened.path} fits {' and '.join(told)}, whose weights have the same shapes. Say which with "
            "--preset."
        )
    close = nearest(part)
    if close is not None:
        return close  # the strict check names what does not fit
    raise CheckpointError(
        f"{opened.path} fits no preset: {_looks_like(part)}. Presets: {', '.join(PRESETS)}."
    )


def check_gpt(opened: Opened, part: Part, preset: Preset) -> None:
    """A transformer must be whole, plain and of the preset's sizes, with what only its weights tell.

    Raises:
        CheckpointError: what is wrong, and the preset that would fit.
    """
    if PARTS.get(part.kind) != (preset.family_name, "gpt"):
        raise CheckpointError(
            f"{opened.path} is no transformer of {preset.name}: it is {DESCRIPTIONS[part.kind]}."
        )
    _check_plain(opened, part)
    check_fit(preset.gpt_shapes, shapes(part.tensors), opened.path, _advice(part, preset))
    if part.kind == "chameleon":
        check_chameleon(opened, part.tensors, cast(ChameleonConfig, preset.gpt))
        return
    null = read(part.tensors[NULL_CAPTION]).float()
    # It is random and never trained, so its values exist in the checkpoint alone.
    if not bool(null.isfinite().all()) or not bool(null.abs().amax(dim=1).gt(0).all()):
        raise CheckpointError(
            f"The null caption of {opened.path} ({NULL_CAPTION}) is empty or not finite, so guidance could "
            "not work. Use the original file."
        )


def check_vq(opened: Opened, part: Part, preset: Preset) -> None:
    """A tokenizer must be whole, plain, and the one that the transformer was trained with.

    Raises:
        CheckpointError: what is wrong, and which file is the right one.
    """
    needed = f"{preset.name} needs {preset.files[1]}"
    wrong = f"{opened.path} is the wrong tokenizer for this model"
    if PARTS.get(part.kind) != (preset.family_name, "vq"):
        raise CheckpointError(f"{wrong}: it is {DESCRIPTIONS[part.kind]}. {needed}.")
    _check_plain(opened, part)
    if "c2i" in opened.path.name.lower():
        raise CheckpointError(
            f"{wrong}: its name says that it belongs to the class-conditional models, whose codes mean "
            f"other pictures. {needed}; rename the file if its name is wrong."
        )
    found = sizes(part)
    own = {"levels": len(preset.vq.channel_multipliers), "codes": preset.vq.codebook_size}
    for what, value in own.items():
        if found.get(what, value) != value:
            raise CheckpointError(f"{wrong}: it has {found[what]} {what} and should have {value}. {needed}.")
    check_fit(preset.vq_shapes, shapes(part.tensors), opened.path, f"{needed}.")


def _check_plain(opened: Opened, part: Part) -> None:
    if not part.tensors:
        raise CheckpointError(f"{opened.path} holds no weights.")
    name = quantised(part.tensors)
    if name:
        kind = str(part.tensors[name].dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{opened.path} is quantised ({name} is {kind}). ciar reads float32, bfloat16 or float16: use "
            "the original file."
        )


def _advice(part: Part, preset: Preset) -> str:
    others = [name for name in fitting(part) if name != preset.name]
    if others:
        return f"It fits the preset {' or '.join(others)}: use --preset {others[0]}."
    return f"No preset would fit: {_looks_like(part)}. {preset.name} needs {preset.files[0]}."


def _looks_like(part: Part) -> str:
    told = ", ".join(f"{name} {value}" for name, value in sizes(part).items())
    return f"it is {DESCRIPTIONS[part.kind]}" + (f" with {told}" if told else "")


def check_finite(name: str, value: torch.Tensor, source: object) -> None:
    """Raises CheckpointError when a tensor holds NaN or infinity."""
    if not bool(value.isfinite().all()):
        raise CheckpointError(
            f"{name} of {source} holds NaN or infinity: the file is damaged. Download it again."
        )
