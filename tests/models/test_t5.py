"""Text features: against transformers' own padded run, and every way in which a folder can be wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_llamagen import write_t5
from torch import Tensor

from ciar.errors import CheckpointError, InputError, NumericalError
from ciar.models.t5 import KEPT_PROMPTS, T5TextEncoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_t5(tmp_path_factory.mktemp("t5") / "flan-t5", shards=2, decoder=True)


def reference(folder: Path, ids: list[int], dtype: torch.dtype, length: int = 120) -> tuple[Tensor, Tensor]:
    """Encoder output and mask, right-padded, of transformers' own loader and padded run."""
    from transformers import T5EncoderModel

    model = T5EncoderModel.from_pretrained(folder, local_files_only=True, dtype=dtype).eval()
    tokens = torch.zeros(1, length, dtype=torch.long)
    tokens[0, : len(ids)] = torch.tensor(ids)
    mask = (torch.arange(length) < len(ids)).long()[None]
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=mask).last_hidden_state[0].float(), mask[0]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_features_are_those_of_the_padded_run_moved_to_the_end(
    folder: Path, dtype: str, tolerance: float
) -> None:
    encoder = T5TextEncoder(folder, dtype=dtype)
    text = encoder.encode("A  red CAT on the house")
    ids = encoder.ids("A  red CAT on the house")[0]
    assert len(ids) == 7
    assert ids[-1] == 1
    padded, mask = reference(folder, ids, getattr(torch, dtype))
    assert text.mask.tolist() == [False] * 113 + [True] * 7
    assert text.features.dtype == torch.float32
    torch.testing.assert_close(text.features[-7:], padded[mask.bool()], atol=tolerance, rtol=0)
    assert (text.features[:-7] == 0).all()
    assert text.warnings == ()


def test_a_long_prompt_is_cut_at_120_tokens_with_a_warning(folder: Path) -> None:
    """Known fault C6: the limit, the count and the tail are named; the end token stays."""
    encoder = T5TextEncoder(folder, dtype="float32")
    exact = encoder.encode("cat " * 119)
    assert exact.mask.all()
    assert exact.warnings == ()
    ids, _, (warning,) = encoder.ids("cat " * 119 + "fox")
    assert "has 121 text tokens and the limit is 120" in warning
    assert "fox" in warning
    assert ids == [*encoder.ids("cat " * 119)[0]]
    assert torch.equal(encoder.encode("cat " * 119 + "fox").features, exact.features)
    assert len(encoder.ids("fox " * 2000)[2]) == 2  # by characters, and by tokens


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        (" \n", "prompt is empty"),
        ("photo.png", "Nothing is left of the prompt 'photo.png'"),
        ("cat\ud800", "lone surrogate"),
        (7, "text, not int"),
    ],
)
def test_prompts_that_say_nothing(folder: Path, prompt: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        T5TextEncoder(folder).encode(prompt)


def test_the_encoder_runs_once_a_prompt(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    real = T5TextEncoder._run

    def counted(self: T5TextEncoder, ids: list[int]) -> Tensor:
        runs.append(len(ids))
        return real(self, ids)

    monkeypatch.setattr(T5TextEncoder, "_run", counted)
    encoder = T5TextEncoder(folder, cache=tmp_path / "cache", identity="one")
    first = encoder.encode("a red cat")
    assert torch.equal(encoder.encode("A red  cat").features, first.features)
    assert runs == [4]
    other = T5TextEncoder(folder, cache=tmp_path / "cache", identity="one")
    assert torch.equal(other.encode("a red cat").features, first.features)
    assert "model" not in other.__dict__  # nothing was loaded for it
    assert runs == [4]
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(b"damaged")
    again = T5TextEncoder(folder, cache=tmp_path / "cache", identity="one")
    assert torch.equal(again.encode("a red cat").features, first.features)
    T5TextEncoder(folder, cache=tmp_path / "cache", identity="two").encode("a red cat")
    assert runs == [4, 4, 4]
    for i in range(KEPT_PROMPTS + 3):
        encoder.encode("cat " * (i + 1))
    assert len(encoder._kept) == KEPT_PROMPTS


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_float16_is_refused(folder: Path, dtype: str) -> None:
    """Known fault C5: T5 overflows in float16."""
    with pytest.raises(InputError, match="bfloat16 or float32"):
        T5TextEncoder(folder, dtype=dtype)


def test_features_that_are_not_finite_are_an_error(folder: Path) -> None:
    encoder = T5TextEncoder(folder, dtype="float32")
    with torch.no_grad():
        encoder.model.shared.weight.fill_(torch.inf)  # type: ignore[union-attr]
    with pytest.raises(NumericalError, match="not finite"):
        encoder.encode("a cat")


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
        (lambda f: (f / "config.json").write_text("{"), "damaged"),
        (lambda f: edit_config(f, model_type="bert"), "type 'bert', not t5"),
        (lambda f: (f / "tokenizer.json").unlink(), r"has no tokenizer\.json"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "damaged"),
        (lambda f: edit_config(f, eos_token_id=2), "does not end texts"),
        (lambda f: edit_config(f, vocab_size=20), "knows more tokens"),
        (lambda f: edit_config(f, num_layers=3), r"missing: encoder\.block\.2"),
        (lambda f: (f / "model-00001-of-00002.safetensors").write_bytes(b""), "is empty"),
        (lambda f: (f / "model.safetensors.index.json").unlink(), "holds no model.safetensors"),
    ],
)
def test_a_folder_that_is_not_whole(folder: Path, tmp_path: Path, damage, message: str) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    damage(copy)
    with pytest.raises(CheckpointError, match=message):
        T5TextEncoder(copy).encode("a cat")
