"""``ciar.Pipeline``: prompts in; pictures, tokens and ledgers out.

Names of the arguments are those of diffusers' pipelines where there is such an argument.
"""

from __future__ import annotations

import json
import math
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from ciar.cloud.sessions import Cloud
from ciar.decoding.options import default_settings, law_of, read_options
from ciar.decoding.strategy import get_strategy
from ciar.device.session import DeviceSession, PictureResult, Progress
from ciar.errors import CloudUnavailable, InputError
from ciar.intervals.thresholds import ThresholdConfig
from ciar.ledger import Decider, Ledger
from ciar.models.bundle import Bundle, check_device
from ciar.models.loading.open import open_bundle
from ciar.models.text import TextFeatures
from ciar.planner.agreement import AGREEMENT_FILE, Table
from ciar.planner.conditions import Wish, check_wish
from ciar.planner.defaults import DEFAULTS
from ciar.planner.drive import Drawn, draw
from ciar.planner.measure import Metered
from ciar.planner.planner import Planner
from ciar.planner.plans import DEVICE_ONLY, Plan
from ciar.planner.probe import Probed, probe
from ciar.protocol.messages import MAX_PROMPT_CHARS, Open, OptionValue, Settings
from ciar.transport.base import Transport
from ciar.transport.inprocess import InProcessTransport
from ciar.transport.websocket import WebSocketTransport

#: Largest ``num_images_per_prompt`` and number of prompts of one call.
MAX_IMAGES = 1000
#: Steps of the device that are timed before the first plan is chosen.
_PROBED_STEPS = 8

#: Called as ``callback(pipe, step, info)``; False stops cleanly.
Callback = Callable[["Pipeline", int, dict[str, Any]], bool | None]


@dataclass
class PipelineOutput:
    """What a pipeline returns; entry i of every list belongs to picture i.

    Attributes:
        images: PIL pictures, or uint8 [height, width, 3] arrays for ``output_type="np"``, or
            nothing for ``"tokens"``.
        tokens: codes in raster order.
        ledgers: what each picture cost.
        prompts, seeds, strategies: what each was made from; for ``auto`` the strategies that really ran.
        plans: for ``auto`` the plans that each ran by, in order; else nothing.
        why: for ``auto`` a sentence a picture that says why; else nothing.
        warnings: sentences for the user.
    """

    images: list[Any] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    ledgers: list[Ledger] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    strategies: list[str] = field(default_factory=list)
    plans: list[tuple[Plan, ...]] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class Pipeline:
    """Makes pictures with one backbone.

    Args:
        bundle: the backbone.
        transport: the way to the cloud; None runs the cloud in this process, through the same
            messages.
    """

    def __init__(self, bundle: Bundle, transport: Transport | None = None) -> None:
        self.bundle = bundle
        self._transport = transport
        self._planner: Planner | None = None
        #: Makes the device's side of a picture; benchmarks put one with a tempo in its place.
        self.session_of: Callable[..., DeviceSession] = DeviceSession

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str | Path = "emoji",
        *,
        cloud: str | None = None,
        token: str | None = None,
        device: str = "cpu",
        device_model: str | None = None,
        weights: str | Path | Sequence[str | Path] | None = None,
        dtype: str | None = None,
    ) -> Pipeline:
        """A pipeline on an embedded backbone, a folder, or a preset with the public files.

        Args:
            name_or_folder: ``emoji``, a folder with config and weights, or a preset's name.
            cloud: ``ws://host:port`` of a ``ciar serve``; None runs the cloud in this process.
            token: access token of that server.
            device: torch device of the models here.
            device_model: which of the backbone's device models; None is its default.
            weights: for a preset: its files, model folders, or a folder of them (``ciar convert``).
            dtype: ``float32`` or ``bfloat16`` for the cloud model; None is the backbone's.
        """
        check_device(device)
        transport = WebSocketTransport(cloud, token=token) if cloud else None
        bundle = open_bundle(name_or_folder, weights, device, dtype)
        if device_model is not None:
            known = bundle.config.get("devices", {})
            if device_model not in known:
                raise InputError(
                    f"{bundle.name} has no device model {device_model!r}. It has: {', '.join(sorted(known))}."
                )
            bundle.defaults = bundle.defaults.with_device(device_model)
        return cls(bundle, transport)

    @property
    def transport(self) -> Transport:
        """The way to the cloud; the in-process one is made when first needed."""
        if self._transport is None:
            self._transport = InProcessTransport(Cloud(self.bundle))
        return self._transport

    @property
    def planner(self) -> Planner:
        """What ``strategy="auto"`` asks; it keeps what it has measured from call to call.

        Raises:
            InputError: the backbone's table of agreement is damaged.
        """
        if self._planner is None:
            self._planner = Planner(
                self.bundle.total,
                bool(self.bundle.config.get("devices")),
                self._transport is None or isinstance(self._transport, InProcessTransport),
                _table(self.bundle.folder),
            )
        return self._planner

    def __call__(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | None = None,
        *,
        guidance_scale: float | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        strategy: str = "ciar",
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        score: str | None = None,
        threshold: float | ThresholdConfig | None = None,
        prefix_rate: float | None = None,
        window: int | None = None,
        action: Literal["replace", "verify"] | None = None,
        payload: Literal["ids", "features"] | None = None,
        injection: bool | None = None,
        options: Mapping[str, OptionValue] | None = None,
        wish: str | None = None,
        callback_on_step_end: Callback | None = None,
        output_type: Literal["pil", "np", "tokens"] = "pil",
    ) -> PipelineOutput:
        """Makes ``num_images_per_prompt`` pictures of each prompt.

        Every picture is made alone, so it equals its lone run whatever else is asked for.

        Args:
            prompt: one prompt or several.
            negative_prompt: what to steer away from.
            guidance_scale: classifier-free guidance, >= 0; 1 switches it off.
            num_images_per_prompt: pictures of each prompt; picture i has noise index i.
            generator: draws the seed when ``seed`` is None.
            seed: 0 to 2**64 - 1; None and no generator draws a fresh one.
            strategy: see ``ciar strategies``; ``auto`` lets the planner choose for each picture.
            temperature, top_k, top_p: sampling law of both models; None is the backbone's.
            score: the gate's score, see ``ciar strategies --gates``; None is the backbone's.
            threshold: the gate's threshold, a number (0 uploads everything) or a rule. None is the one
                that is calibrated for the score, or where there is none, a budget of the same share.
            prefix_rate: share of the tokens that the cloud makes first.
            window: tokens a request of windowed strategies.
            action: what the cloud does with an uncertain token.
            payload: what travels.
            injection: whether interval features are added in the cloud.
            options: the strategy's own settings by name; see docs/strategies.md.
            wish: for ``auto``: ``exact``, ``balanced`` (the default), ``cheapest`` or ``offline``.
            callback_on_step_end: called after each decided token.
            output_type: ``pil``, ``np`` or ``tokens``.

        Raises:
            InputError: an argument is out of its range.
            RemoteError: the cloud cannot be reached or fails.
        """
        try:
            prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        except TypeError:
            raise InputError(f"A prompt is text or a list of texts, not {type(prompt).__name__}.") from None
        _check_count("prompts", len(prompts))
        _check_count("num_images_per_prompt", num_images_per_prompt)
        if output_type not in ("pil", "np", "tokens"):
            raise InputError(f"output_type is {output_type!r}; it must be pil, np or tokens.")
        wanted = check_wishes(strategy, wish, window, options)
        defaults = self.bundle.defaults
        asked: dict[str, Any] = {
            "guidance": guidance_scale,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "prefix_rate": prefix_rate,
            "window": window,
            "action": action,
            "payload": payload,
            "injection": injection,
        }
        settings = replace(
            default_settings(defaults, strategy if wanted is None else "base"),
            seed=draw_seed(seed, generator),
            options=tuple((options or {}).items()),
            **{name: value for name, value in asked.items() if value is not None},
        )
        check_settings(settings)
        score = defaults.score if score is None else score
        gate = defaults.threshold_for(score)
        if isinstance(threshold, ThresholdConfig):
            gate = threshold
        elif threshold is not None:
            if math.isnan(threshold) or threshold < 0:
                raise InputError(f"threshold is {threshold}; it must be 0 (upload everything) or more.")
            # A score may be negative, and 0 means that everything is uploaded.
            gate = ThresholdConfig(kind="fixed", value=threshold or -math.inf, share=gate.share)
        out = PipelineOutput()
        jobs = [(text, i) for text in prompts for i in range(num_images_per_prompt)]
        for number, (text, image) in enumerate(jobs):
            began = time.perf_counter()
            here = replace(settings, image=image)
            opening = Open(
                backbone=self.bundle.name,
                weights=self.bundle.weights,
                prompt=self._travelling(text),
                negative_prompt=self._travelling(negative_prompt) if negative_prompt else "",
                settings=here,
            )
            features = self.bundle.text.encode(text)
            text_ms = (time.perf_counter() - began) * 1e3

            def progress(done: int, ledger: Ledger, number: int = number) -> bool | None:
                if callback_on_step_end is None:
                    return None
                info = {"done": done, "total": self.bundle.total, "image": number, "images": len(jobs)}
                return callback_on_step_end(self, done, info | {"ledger": ledger})

            result: PictureResult | Drawn
            if wanted is None:
                chosen = get_strategy(strategy)
                transport = self.transport if chosen.uses_cloud else None
                result = self.session_of(self.bundle, chosen, opening, features, gate, score, transport).run(
                    progress
                )
            else:
                result = self._draw_planned(wanted, opening, features, gate, score, progress)
            out.warnings += [w for w in (*features.warnings, *result.warnings) if w not in out.warnings]
            if result.stopped:
                break
            decoding = time.perf_counter()
            if output_type != "tokens":
                out.images.append(self._picture(result.tokens, output_type))
            ended = time.perf_counter()
            result.ledger.text_ms = text_ms
            result.ledger.pixels_ms = (ended - decoding) * 1e3
            result.ledger.total_ms = (ended - began) * 1e3
            out.tokens.append(result.tokens)
            out.ledgers.append(result.ledger)
            out.prompts.append(text)
            out.seeds.append(settings.seed)
            if isinstance(result, Drawn):
                out.plans.append(tuple(result.plans))
                out.why.append("; ".join(result.why))
            out.strategies.append(result.strategy if isinstance(result, Drawn) else strategy)
        return out

    def _draw_planned(
        self,
        wish: Wish,
        opening: Open,
        features: TextFeatures,
        gate: ThresholdConfig,
        score: str,
        progress: Progress,
    ) -> Drawn:
        """One picture by the planner's choice."""
        planner = self.planner
        # Offline must not even load the cloud's model.
        way = None if wish == "offline" else Metered(self.transport, planner.meter)

        def leg(
            plan: Plan, tokens: Sequence[int], decided: Sequence[Decider], watch: Progress
        ) -> PictureResult:
            chosen = get_strategy(plan.strategy)
            message = replace(opening, settings=_planned(opening.settings, plan))
            transport = way if chosen.uses_cloud else None
            session = self.session_of(self.bundle, chosen, message, features, gate, score, transport)
            session.resume(tokens, decided)
            result = session.run(watch)
            planner.meter.stepped(session.run_state.pace.step_ms)
            return result

        spent = Ledger()
        if planner.device and not planner.meter.step_ms:
            marks: list[float] = []

            def timed(done: int, ledger: Ledger) -> bool:
                marks.append(ledger.device_ms)
                return done < _PROBED_STEPS

            message = replace(opening, settings=_planned(opening.settings, DEVICE_ONLY))
            alone = get_strategy(DEVICE_ONLY.strategy)
            tried = self.session_of(self.bundle, alone, message, features, gate, score, None).run(timed)
            # The first step is cold, and a plan that leaves the device out would never correct its price.
            planner.meter.stepped(statistics.median([b - a for a, b in pairwise(marks)] or marks))
            spent.device_ms, spent.device_steps = tried.ledger.device_ms, tried.ledger.device_steps
            spent.discarded = len(tried.tokens)

        def measure() -> Probed:
            assert way is not None, "only a wish that needs a cloud asks for a probe"
            return probe(way, opening)

        guided = 1 if opening.settings.guidance == 1.0 else 2
        try:
            return draw(planner, wish, leg, measure, guided, progress, spent)
        except CloudUnavailable as error:
            if not planner.device:
                raise
            raise CloudUnavailable(
                f"{error} To draw with the device model alone, wish for offline."
            ) from error

    def _travelling(self, prompt: str) -> str:
        """What is sent of a prompt: as much as the text encoder reads, which warns of what it cuts."""
        return self.bundle.text.prepare(prompt)[:MAX_PROMPT_CHARS]

    def _picture(self, tokens: list[int], output_type: str) -> Any:
        pixels = self.decode([tokens])[0]
        return Image.fromarray(pixels) if output_type == "pil" else pixels

    @torch.inference_mode()
    def decode(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        """Pixels of codes: [pictures][tokens] to uint8 [pictures, height, width, 3]."""
        codes = torch.tensor(tokens, device=self.bundle.device)
        return self.bundle.pixels(codes).cpu().numpy()


def check_wishes(
    strategy: str, wish: str | None, window: int | None, options: Mapping[str, OptionValue] | None
) -> Wish | None:
    """The wish of a call, None where the strategy is not left to the planner.

    Args:
        strategy, wish, window, options: as in :meth:`Pipeline.__call__`.

    Raises:
        InputError: the wish is unknown, or what was asked for does not go together.
    """
    if strategy != "auto":
        get_strategy(strategy)
        if wish is not None:
            raise InputError(f"A wish is for strategy 'auto', not {strategy!r}. Leave one of the two out.")
        return None
    if window is not None:
        raise InputError("Strategy 'auto' chooses the window itself. Leave it out, or name a strategy.")
    read_options("auto", (), tuple((options or {}).items()))
    return check_wish("balanced" if wish is None else wish)


def _planned(settings: Settings, plan: Plan) -> Settings:
    """Settings with what a plan says in them."""
    return replace(
        settings,
        strategy=plan.strategy,
        window=settings.window if plan.window is None else plan.window,
        options=(*settings.options, *plan.options),
    )


def _table(folder: Path) -> Table:
    """A backbone's table of agreement: the one beside its weights, and for what it lacks the one that ships.

    Raises:
        InputError: the file is damaged, or cannot be read.
    """
    path = folder / AGREEMENT_FILE
    if not path.is_file():
        return DEFAULTS
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}). Allow it, or remove the file.") from None
    except ValueError as error:
        raise InputError(f"{path} is no JSON ({error}). Restore the file or remove it.") from None
    return Table.from_dict(values, DEFAULTS)


def draw_seed(seed: int | None, generator: torch.Generator | None) -> int:
    """The seed to use.

    Raises:
        InputError: it is no whole number from 0 to 2**64 - 1.
    """
    if seed is None:
        if generator is not None:
            return int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
        return secrets.randbits(32)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise InputError(f"seed is {seed!r}; it must be a whole number from 0 to 2**64 - 1.")
    return seed


def check_settings(settings: Settings) -> None:
    """Checks the ranges that both sides rely on.

    Raises:
        InputError: names the setting and its range.
    """
    get_strategy(settings.strategy).values(settings)
    law_of(settings)
    if not (math.isfinite(settings.guidance) and settings.guidance >= 0):
        raise InputError(f"guidance_scale is {settings.guidance}; it must be 0 or more.")
    if not 0 <= settings.prefix_rate <= 1:
        raise InputError(f"prefix_rate is {settings.prefix_rate}; it must be from 0 to 1.")
    if not 1 <= settings.window <= 1024:
        raise InputError(f"window is {settings.window}; it must be from 1 to 1024.")
    if settings.action not in ("replace", "verify"):
        raise InputError(f"action is {settings.action!r}; it must be replace or verify.")
    if settings.payload not in ("ids", "features"):
        raise InputError(f"payload is {settings.payload!r}; it must be ids or features.")


def _check_count(name: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_IMAGES:
        raise InputError(f"{name} is {count!r}; it must be from 1 to {MAX_IMAGES}.")
