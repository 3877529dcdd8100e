"""A backbone's folder: configuration, weights of all parts, defaults. Loads only what is asked for."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from ciar.errors import CheckpointError, InputError
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.checkpoint import folder_digest, load_strict, read_tensors
from ciar.models.device import DeviceConfig, DeviceModel
from ciar.models.gpt import GPT, GPTConfig
from ciar.models.inference import InferenceGPT
from ciar.models.text import StaticTextEncoder, TextEncoder
from ciar.models.vq import VQConfig, VQModel

Module = TypeVar("Module", bound=torch.nn.Module)

#: Backbones that ship with the package.
EMBEDDED = Path(__file__).resolve().parent.parent / "weights"


@dataclass(frozen=True)
class Defaults:
    """What a backbone uses where the user asks for nothing else.

    Attributes:
        guidance, temperature, top_k, top_p, prefix_rate, window, injection: as in ``Settings``.
        score: name of the gate's score (``ciar.intervals.scores``).
        threshold: how the gate decides.
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
    device: str = "device"


class Bundle:
    """One backbone on disk.

    Args:
        folder: holds ``config.json`` and the weights that it names.
        device: where the models are put.
    """

    def __init__(self, folder: Path, device: torch.device | str = "cpu") -> None:
        self.folder = folder
        self.device = torch.device(device)
        path = folder / "config.json"
        try:
            self.config: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist, so {folder} is no backbone folder.") from None
        except ValueError as error:
            raise CheckpointError(f"{path} is no JSON ({error}). Restore the file.") from None
        self.weights = folder_digest(folder)
        try:
            self.name: str = self.config["name"]
            self.gpt_config = GPTConfig.from_dict(self.config["gpt"])
            self.vq_config = VQConfig.from_dict(self.config["vq"])
            values = dict(self.config.get("defaults", {}))
            threshold = ThresholdConfig.from_dict(values.pop("threshold", {}))
            self.defaults = Defaults(**values, threshold=threshold)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path} does not describe a backbone ({type(error).__name__}: {error}). Restore the file."
            ) from None

    @property
    def total(self) -> int:
        """Tokens of a picture."""
        return self.gpt_config.tokens

    @cached_property
    def gpt(self) -> GPT:
        """The cloud model."""
        return self._load(GPT(self.gpt_config), "gpt.safetensors")

    @cached_property
    def vq(self) -> VQModel:
        """The tokenizer; always float32."""
        return self._load(VQModel(self.vq_config), "vq.safetensors")

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
        return self._load(DeviceModel(config), f"{stem}.safetensors")

    @cached_property
    def device_trunk(self) -> InferenceGPT:
        """The device model's trunk, ready for decoding."""
        return InferenceGPT(self.device_model.trunk)

    @cached_property
    def text(self) -> TextEncoder:
        """The text encoder, the same for cloud and device."""
        return StaticTextEncoder.load(self.folder)

    def _load(self, module: Module, file: str) -> Module:
        path = self.folder / file
        load_strict(module, read_tensors(path), path)
        return module.to(self.device).eval().requires_grad_(False)


def load_bundle(name_or_folder: str | Path, device: torch.device | str = "cpu") -> Bundle:
    """An embedded backbone by name, or any folder that holds one.

    Raises:
        InputError: neither; the message lists the embedded names.
        CheckpointError: the folder is damaged.
    """
    embedded = EMBEDDED / str(name_or_folder)
    if isinstance(name_or_folder, str) and (embedded / "config.json").is_file():
        return Bundle(embedded, device)
    folder = Path(name_or_folder)
    if folder.is_dir():
        return Bundle(folder, device)
    known = ", ".join(sorted(p.parent.name for p in EMBEDDED.glob("*/config.json"))) or "none"
    raise InputError(
        f"There is no backbone {str(name_or_folder)!r}. The embedded ones are: {known}; or pass a folder "
        "that holds config.json and weights."
    )


def write_config(
    folder: Path,
    name: str,
    gpt: GPTConfig,
    vq: VQConfig,
    devices: dict[str, DeviceConfig],
    defaults: Defaults,
) -> None:
    """Writes a backbone's ``config.json``."""
    document = {
        "name": name,
        "gpt": gpt.to_dict(),
        "vq": vq.to_dict(),
        "devices": {stem: config.to_dict() for stem, config in devices.items()},
        "defaults": asdict(defaults) | {"threshold": defaults.threshold.to_dict()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n")
