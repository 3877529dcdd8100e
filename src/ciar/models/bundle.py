"""A backbone's folder: configuration, weights of all parts, defaults. Loads only what is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ciar.errors import CheckpointError, InputError
from ciar.intervals.gates import gate_named, share_threshold
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.checkpoint import build_from, folder_digest, models_digest, read_tensors
from ciar.models.device import DeviceConfig, DeviceModel, DeviceTrunk
from ciar.models.eagle import EagleModel
from ciar.models.families import FAMILIES
from ciar.models.family import ImageTokenizer, Sizes
from ciar.models.gpt import GPT, GPTConfig
from ciar.models.matrix import Matrix
from ciar.models.text import TextEncoder
from ciar.models.text_kinds import TextConfig, open_text_encoder
from ciar.models.vq import VQConfig, VQModel

Module = TypeVar("Module", bound=torch.nn.Module)
Kind = TypeVar("Kind")

#: Backbones that ship with the package.
EMBEDDED = Path(__file__).resolve().parent.parent / "weights"
#: What the cloud model may run in.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Defaults:
    """What a backbone uses where the user asks for nothing else.

    Attributes:
        guidance, temperature, top_k, top_p, prefix_rate, window, injection: as in ``Settings``.
        score: name of the gate's score (``ciar.intervals.gates``).
        threshold: how the gate decides with that score.
        thresholds: calibrated thresholds of other scores, by name, all to the same share of uploads.
        share: share of a picture's tokens that the calibrated thresholds upload, 0 to 1.
        device: file stem of the device model.
    """

    guidance: float = 3.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    prefix_rate: float = 0.0625
    window: int = 16
    injection: bool = True
    score: str = "interval"
    threshold: ThresholdConfig = field(default_factory=ThresholdConfig)
    thresholds: dict[str, ThresholdConfig] = field(default_factory=dict)
    share: float = 0.30
    device: str = "device"

    def threshold_for(self, score: str) -> ThresholdConfig:
        """The threshold of a score: the calibrated one, or else a budget of the same share of uploads.

        Raises:
            InputError: there is no such score.
        """
        gate_named(score)
        if score == self.score:
            return self.threshold
        if score in self.thresholds:
            return self.thresholds[score]
        return share_threshold(score, self.judged_share)

    @property
    def judged_share(self) -> float:
        """``share`` as a share of the judged tokens, which the prefix is not among."""
        return min(1.0, self.share / max(1.0 - self.prefix_rate, 1e-9))

    def with_device(self, stem: str) -> Defaults:
        """The same with another device model: budgets, and no learned gate, since nothing was calibrated."""
        if stem == self.device:
            return self
        score = "entropy" if self.score == "learned" else self.score
        threshold = share_threshold(score, self.judged_share)
        return replace(self, device=stem, score=score, threshold=threshold, thresholds={})

    def to_dict(self) -> dict[str, Any]:
        """For JSON; :meth:`from_dict` is its inverse."""
        thresholds = {name: one.to_dict() for name, one in self.thresholds.items()}
        return asdict(self) | {"threshold": self.threshold.to_dict(), "thresholds": thresholds}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Defaults:
        """Defaults from their ``to_dict``; what is left out, as in older files, takes its default.

        Raises:
            InputError: a number of a threshold is out of range, or a score unknown.
            TypeError: a name is unknown.
        """
        threshold = ThresholdConfig.from_dict(values.get("threshold", {}))
        thresholds = {
            gate_named(name).name: ThresholdConfig.from_dict(one)
            for name, one in values.get("thresholds", {}).items()
        }
        return cls(**{**values, "threshold": threshold, "thresholds": thresholds})


def check_device(name: str | torch.device) -> None:
    """Tries a device out, before anything is loaded for it.

    Raises:
        InputError: it is unknown, or not usable on this machine.
    """
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        words = " ".join(str(error).split())[:200]
        raise InputError(f"Device {str(name)!r} is not usable here ({words}). Try cpu.") from None


class Bundle:
    """One backbone on disk.

    Args:
        folder: holds ``config.json`` and the weights that it names.
        device: where the models are put.
        dtype: what the cloud model runs in, ``float32`` or ``bfloat16``; None takes what the folder
            was made for. The tokenizer and the device model always run in float32.

    Raises:
        CheckpointError: the folder holds no backbone, or its ``config.json`` is damaged.
        InputError: the type is neither of the two.
    """

    def __init__(self, folder: Path, device: torch.device | str = "cpu", dtype: str | None = None) -> None:
        path = folder / "config.json"
        try:
            config: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist, so {folder} is no backbone folder. If it holds public checkpoints, "
                f"make one of them: ciar convert {folder} --out DIR"
            ) from None
        except ValueError as error:
            raise CheckpointError(f"{path} is no JSON ({error}). Restore the file.") from None
        self._configure(config, folder, device, dtype, path)
        self.weights = self._wire_digest()

    def _configure(
        self,
        config: dict[str, Any],
        folder: Path,
        device: torch.device | str,
        dtype: str | None,
        path: Path | str,
    ) -> None:
        self.folder, self.config = folder, config
        self.device = torch.device(device)
        try:
            self.name: str = config["name"]
            self.family = FAMILIES[config.get("family", "llamagen")]
            self.gpt_config: Sizes = self.family.config(config["gpt"])
            self.vq_config = VQConfig.from_dict(config["vq"])
            self.defaults = Defaults.from_dict(config.get("defaults", {}))
            self.text_config = TextConfig.from_dict(config.get("text", {}))
            chosen = dtype or config.get("dtype", "float32")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path} does not describe a backbone ({type(error).__name__}: {error}). Restore the file."
            ) from None
        if chosen not in DTYPES:
            raise InputError(f"The cloud model cannot run in {chosen!r}. Use {' or '.join(DTYPES)}.")
        self.dtype = DTYPES[chosen]

    def _wire_digest(self) -> str:
        """Names the weights that both sides of a wire must share; "" where any will do."""
        if self.text_config.kind == "static":
            return folder_digest(self.folder)
        if self.text_config.kind == "none":  # no drafting without text, so nothing depends on it
            return ""
        return models_digest(self.folder, self.text_config.encoder)

    @property
    def total(self) -> int:
        """Tokens of a picture."""
        return self.gpt_config.tokens

    @cached_property
    def model(self) -> nn.Module:
        """The cloud model, of any family."""
        return self._load(lambda: self.family.model(self.gpt_config), "gpt", self.dtype)

    @cached_property
    def image_tokenizer(self) -> nn.Module:
        """The tokenizer, of any family; always float32."""
        return self._load(lambda: self.family.vq(self.vq_config), "vq")

    @property
    def gpt(self) -> GPT:
        """The cloud model, for what works with the LlamaGen family alone.

        Raises:
            InputError: it is of another family.
        """
        return self._of_llamagen(self.model, GPT)

    @property
    def vq(self) -> VQModel:
        """The tokenizer, for what works with the LlamaGen family alone.

        Raises:
            InputError: it is of another family.
        """
        return self._of_llamagen(self.image_tokenizer, VQModel)

    @cached_property
    def gpt_ends(self) -> GPT:
        """The cloud model without its layers: what a drafter on its features needs, on a device.

        Where the whole model is here already, it is that one.

        Raises:
            InputError: it is of another family.
        """
        if "model" in vars(self):
            return self.gpt
        config = replace(self._of_llamagen(self.gpt_config, GPTConfig), n_layer=0)
        tensors, path = self._tensors("gpt")
        ends = {name: value for name, value in tensors.items() if not name.startswith("layers.")}
        module = build_from(lambda: GPT(config), ends, path, self.dtype)
        return module.to(self.device).eval().requires_grad_(False)

    def _of_llamagen(self, part: object, kind: type[Kind]) -> Kind:
        if not isinstance(part, kind):
            raise InputError(
                f"This works with backbones of the LlamaGen family, and {self.name} is of the family "
                f"{self.family.title}. Choose another with --backbone."
            )
        return part

    @cached_property
    def codes(self) -> Tensor:
        """The tokenizer's codes as they are decoded, float32 [codes, dim]."""
        return self.family.codes(self.image_tokenizer).detach()

    @torch.inference_mode()
    def pixels(self, codes: Tensor) -> Tensor:
        """Pictures of codes: int64 [batch, tokens] to uint8 [batch, height, width, 3]."""
        tokenizer: ImageTokenizer = self.image_tokenizer  # type: ignore[assignment]  # a module has it
        return self.family.pixels(tokenizer.decode(codes))

    @cached_property
    def device_model(self) -> DeviceModel:
        """The device model that the defaults name."""
        stem = self.defaults.device
        if stem not in self.config.get("devices", {}):
            raise CheckpointError(
                f"{self.folder} holds no device model {stem!r}. Train one with ciar train device, or use "
                "--strategy base."
            )
        config = DeviceConfig.from_dict(self.config["devices"][stem])
        model = self._load(lambda: DeviceModel(config), stem)
        model.head.product = Matrix(model.head.centre.weight)
        return model

    @property
    def has_eagle(self) -> bool:
        """Whether the folder holds an EAGLE drafter."""
        return (self.folder / "eagle.safetensors").is_file()

    @cached_property
    def eagle(self) -> EagleModel:
        """The EAGLE drafter of the cloud model.

        Raises:
            CheckpointError: there is none.
            InputError: the cloud model is of a family for which there is none.
        """
        config = self._of_llamagen(self.gpt_config, GPTConfig)
        if not self.has_eagle:
            raise CheckpointError(
                f"{self.folder} holds no EAGLE drafter. Train one with ciar train eagle and pack it with "
                "ciar train assemble, or use another strategy."
            )
        return self._load(lambda: EagleModel(config), "eagle", self.dtype)

    @cached_property
    def device_trunk(self) -> DeviceTrunk:
        """The device model's trunk, ready for decoding."""
        return DeviceTrunk(self.device_model)

    @cached_property
    def text(self) -> TextEncoder:
        """The text encoder, the same for cloud and device."""
        return self._open_text()

    def _open_text(self) -> TextEncoder:
        return open_text_encoder(self.folder, self.text_config, self.device)

    def _tensors(self, part: str) -> tuple[dict[str, Tensor], Path]:
        """Tensors of a part, memory-mapped, and where they are from."""
        path = self.folder / f"{part}.safetensors"
        return read_tensors(path), path

    def _load(self, build: Callable[[], Module], part: str, dtype: torch.dtype = torch.float32) -> Module:
        module = build_from(build, *self._tensors(part), dtype)
        return module.to(self.device).eval().requires_grad_(False)


def load_bundle(
    name_or_folder: str | Path, device: torch.device | str = "cpu", dtype: str | None = None
) -> Bundle:
    """An embedded backbone by name, or any folder that holds one.

    Args:
        name_or_folder: name or folder.
        device: where the models are put.
        dtype: what the cloud model runs in; see :class:`Bundle`.

    Raises:
        InputError: neither; the message lists the embedded names, or says how to convert.
        CheckpointError: the folder is damaged.
    """
    embedded = EMBEDDED / str(name_or_folder)
    if isinstance(name_or_folder, str) and (embedded / "config.json").is_file():
        return Bundle(embedded, device, dtype)
    folder = Path(name_or_folder)
    if folder.is_dir():
        return Bundle(folder, device, dtype)
    if folder.is_file():
        raise InputError(
            f"{folder} is a file, and a backbone is a folder. Make one of it: ciar convert {folder} ... "
            "--out DIR"
        )
    from ciar.models.presets import PRESETS  # it knows the defaults of this module

    preset = PRESETS.get(str(name_or_folder))
    if preset is not None:
        raise InputError(
            f"The weights of {preset.name} do not ship with ciar. Convert the public files and pass the "
            f"folder: {preset.command}"
        )
    known = ", ".join(sorted(p.parent.name for p in EMBEDDED.glob("*/config.json"))) or "none"
    raise InputError(
        f"There is no backbone {str(name_or_folder)!r}. The embedded ones are: {known}; or pass a folder "
        "that holds config.json and weights."
    )


def write_config(
    folder: Path,
    name: str,
    gpt: Sizes,
    vq: VQConfig,
    devices: dict[str, DeviceConfig],
    defaults: Defaults,
    **further: Any,
) -> None:
    """Writes a backbone's ``config.json``.

    Args:
        folder: made when it is missing.
        name: of the backbone.
        gpt, vq, devices: sizes of its parts; devices by file stem.
        defaults: what it uses where the user asks for nothing else.
        further: ``family`` (of the models), ``dtype`` (what the cloud model runs in), ``text`` (kind of
            text encoder), and what is worth knowing of the origin. Left out, it is a LlamaGen model in
            float32 with a word-piece table.
    """
    document = config_document(name, gpt, vq, devices, defaults, **further)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n")


def config_document(
    name: str,
    gpt: Sizes,
    vq: VQConfig,
    devices: dict[str, DeviceConfig],
    defaults: Defaults,
    **further: Any,
) -> dict[str, Any]:
    """The content of ``config.json``; see :func:`write_config`."""
    return {
        "name": name,
        "gpt": gpt.to_dict(),
        "vq": vq.to_dict(),
        "devices": {stem: config.to_dict() for stem, config in devices.items()},
        "defaults": defaults.to_dict(),
        **further,
    }
