"""The EAGLE drafter on the tiny backbone: caches against whole sequences, trees against single passes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import device_session, opening, picture_of
from tiny import TINY_GPT

import ciar.decoding.eagle as eagle_module
from ciar.cloud.engine import CloudEngine, Slot
from ciar.cloud.sessions import Cloud
from ciar.cloud.trees import answer_tree, attach_eagle
from ciar.decoding.batch import Batch
from ciar.decoding.feature_rows import row_bytes
from ciar.decoding.sampling import guide
from ciar.decoding.strategy import GrowTree, KeepPath, Pass, TreePass, get_strategy
from ciar.errors import CheckpointError, InputError, ProtocolError
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.bundle import Bundle, load_bundle
from ciar.models.cache import KVCache
from ciar.protocol.messages import Draft, Settings
from ciar.transport.faulty import Fault, FaultyTransport
from ciar.transport.inprocess import InProcessTransport

SCALE = 3.0
TOKENS = [5, 9, 33]
#: A tree of two branches behind the last known token, and a leaf of its own.
NODES, PARENTS = [7, 8, 20, 21, 22, 40], [-1, -1, 0, 0, 2, 1]


@pytest.fixture(params=["", "sun dog red"], ids=["one length", "padded"])
def opened(tiny_bundle: Bundle, request: pytest.FixtureRequest) -> tuple[CloudEngine, Slot]:
    """A slot that has read a prompt; a negative prompt of another length leaves padding in its row."""
    engine = CloudEngine(tiny_bundle.gpt)
    text = tiny_bundle.text.encode("a smiling cat with sunglasses")
    negative = tiny_bundle.text.encode(request.param) if request.param else None
    slot = engine.open(text, negative, SCALE, text)
    attach_eagle(engine, slot, tiny_bundle.eagle, tiny_bundle.gpt)
    return engine, slot


def whole(bundle: Bundle, slot: Slot, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embedded sequences, their features and the text mask of both rows, without a cache."""
    assert slot.text is not None
    rows = slot.text[0]
    mask = torch.ones(rows.shape[:2], dtype=torch.bool) if slot.text_mask is None else slot.text_mask
    x = torch.cat([rows, bundle.gpt.embed_tokens(torch.tensor([tokens] * 2))], dim=1)
    return x, bundle.gpt.hidden_of(x, mask), mask


@torch.no_grad()
def test_the_drafters_cache_gives_what_whole_sequences_give(
    tiny_bundle: Bundle, opened: tuple[CloudEngine, Slot]
) -> None:
    engine, slot = opened
    gpt, eagle = tiny_bundle.gpt, tiny_bundle.eagle
    engine.run(slot, Pass(0, TOKENS[:-1]))
    root = answer_tree(engine, slot, GrowTree(), TOKENS)
    x, features, mask = whole(tiny_bundle, slot, TOKENS)
    estimate = eagle.estimate(gpt, x, features, mask)
    torch.testing.assert_close(root, guide(*gpt.head(estimate[:, -1:]), SCALE), atol=1e-4, rtol=1e-4)
    # Nodes go on from estimates: a path is a sequence whose last features are estimated.
    first = answer_tree(engine, slot, GrowTree((7, 8), (-1, -1)), TOKENS)
    second = answer_tree(engine, slot, GrowTree((20, 40), (0, 1)), TOKENS)
    assert first is not None
    assert second is not None
    for path, found in (((7,), first[0]), ((8,), first[1]), ((7, 20), second[0]), ((8, 40), second[1])):
        longer, seen = x, features.clone()
        seen[:, -1] = 0.0  # the cloud has not seen the last known token yet
        seen = torch.cat([features[:, :-1], estimate[:, -1:]], dim=1)
        for token in path:
            longer = torch.cat([longer, gpt.embed_tokens(torch.tensor([[token]] * 2))], dim=1)
            # The feature behind the node itself is not read.
            behind = eagle.estimate(gpt, longer, torch.cat([seen, seen[:, -1:]], dim=1), mask)[:, -1:]
            seen = torch.cat([seen, behind], dim=1)
        expected = guide(*gpt.head(seen[:, -1:]), SCALE)[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def check_tree(engine: CloudEngine, slot: Slot, bundle: Bundle) -> None:
    """Every node's logits are those of its path alone, before and after a path is kept."""
    text = bundle.text.encode("a smiling cat with sunglasses")

    def alone(tokens: list[int]) -> torch.Tensor:
        other = Slot(KVCache(slot_cells.clone(), slot.cache.first), SCALE, slot.text_mask, slot.prefill)
        return engine.run(other, Pass(0, tokens))[-1]

    del text
    slot_cells = slot.cache.cells
    engine.run(slot, Pass(0, TOKENS[:-1]))
    passes, rows = slot.passes, slot.token_rows
    logits = answer_tree(engine, slot, TreePass(2, TOKENS[2:], NODES, PARENTS), TOKENS)
    assert logits is not None
    assert (slot.passes, slot.token_rows) == (passes + 1, rows + 2 * 7)
    paths = {0: [7], 1: [8], 2: [7, 20], 3: [7, 21], 4: [7, 20, 22], 5: [8, 40]}
    torch.testing.assert_close(logits[0], alone(TOKENS), atol=1e-4, rtol=1e-4)
    for node, path in paths.items():
        torch.testing.assert_close(logits[node + 1], alone(TOKENS + path), atol=1e-4, rtol=1e-4)
    answer_tree(engine, slot, KeepPath(3, (1, 5)), TOKENS)
    known = [*TOKENS, 8, 40, 50]
    torch.testing.assert_close(engine.run(slot, Pass(5, [50]))[-1], alone(known), atol=1e-4, rtol=1e-4)


def test_a_tree_is_judged_as_its_paths_are(tiny_bundle: Bundle, opened: tuple[CloudEngine, Slot]) -> None:
    check_tree(*opened, tiny_bundle)


def test_fault_a_tree_mask_that_is_plainly_causal(
    tiny_bundle: Bundle, opened: tuple[CloudEngine, Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        eagle_module, "ancestry", lambda parents: torch.ones(len(parents), len(parents)).tril().bool()
    )
    with pytest.raises(AssertionError, match="not close"):
        check_tree(*opened, tiny_bundle)


def test_fault_stale_cells_behind_a_rejected_branch(
    tiny_bundle: Bundle, opened: tuple[CloudEngine, Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCache, "move", lambda *_: None)
    with pytest.raises(AssertionError, match="not close"):
        check_tree(*opened, tiny_bundle)


def test_what_a_kept_path_tells_the_drafter(tiny_bundle: Bundle, opened: tuple[CloudEngine, Slot]) -> None:
    """After a round the drafter stands where it would after plain passes over the same tokens."""
    engine, slot = opened
    engine.run(slot, Pass(0, TOKENS[:-1]))
    answer_tree(engine, slot, GrowTree(), TOKENS)
    answer_tree(engine, slot, GrowTree((7, 8), (-1, -1)), TOKENS)
    answer_tree(engine, slot, TreePass(2, TOKENS[2:], NODES, PARENTS), TOKENS)
    answer_tree(engine, slot, KeepPath(3, (1, 5)), TOKENS)
    known = [*TOKENS, 8, 40, 50]
    found = answer_tree(engine, slot, GrowTree(), known)
    x, features, mask = whole(tiny_bundle, slot, known)
    with torch.no_grad():
        estimate = tiny_bundle.eagle.estimate(tiny_bundle.gpt, x, features, mask)[:, -1:]
        torch.testing.assert_close(found, guide(*tiny_bundle.gpt.head(estimate), SCALE), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_eagle2_is_base_in_fewer_passes(tiny_bundle: Bundle, tiny_cloud: Cloud, guidance: float) -> None:
    wire = InProcessTransport(tiny_cloud)
    fewer = 0
    for seed in range(4):
        values = {"seed": seed, "guidance": guidance, "temperature": 0.5}
        base, session = picture_of(tiny_cloud, opening("a red cat", "base", **values))
        made = device_session(tiny_bundle, wire, opening("a red cat", "eagle2", **values)).run()
        assert made.tokens == base
        fewer += session._slot.passes - made.ledger.cloud_passes
    assert fewer > 0


@pytest.mark.parametrize("name", ["eagle1-static", "eagle2"])
@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
@pytest.mark.parametrize(("guidance", "negative"), [(1.0, ""), (3.0, ""), (3.0, "sun dog red car")])
def test_split_gives_the_pictures_of_colocated(
    tiny_bundle: Bundle, tiny_cloud: Cloud, name: str, kind: str, guidance: float, negative: str
) -> None:
    """The same tokens in the same passes; what else there is to pay travels and is counted."""
    wire = InProcessTransport(tiny_cloud)
    made = []
    for place in ("colocated", "split"):
        options = (("placement", place), ("features", kind))
        message = opening("a red cat", name, negative, seed=5, guidance=guidance, options=options)
        made.append(device_session(tiny_bundle, wire, message).run())
    here, there = made
    assert here.tokens == there.tokens
    assert here.ledger.cloud_passes == there.ledger.cloud_passes
    assert here.ledger.token_rows == there.ledger.token_rows
    assert here.ledger.device_steps == 0 < there.ledger.device_steps
    # Down come features of the text and of all known tokens before the last round, both rows; a round trip
    # is a tree, and one more opens the session.
    rows, text = (1 if guidance == 1.0 else 2), 4 if negative else 3
    per = rows * row_bytes(kind, TINY_GPT.dim)
    extra = there.ledger.bytes_down - here.ledger.bytes_down
    assert (text + 1) * per < extra < (text + 16) * per + 40 * there.ledger.round_trips
    assert there.ledger.round_trips == there.ledger.cloud_passes + 1
    assert there.ledger.bytes_up > here.ledger.bytes_up


def test_features_that_fill_several_frames(
    tiny_bundle: Bundle, tiny_cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle_module, "MOST_TOLD_BYTES", 2 * 2 * 2 * TINY_GPT.dim)  # two elements
    wire = InProcessTransport(tiny_cloud)
    message = opening("a red cat", "eagle2", seed=5, options=(("placement", "split"),))
    base = picture_of(tiny_cloud, opening("a red cat", "base", seed=5))[0]
    assert device_session(tiny_bundle, wire, message).run().tokens == base
    session = device_session(tiny_bundle, wire, message)
    session.run_state.tokens[:], session.run_state.decided[:] = base[:7], ["prefix"] * 7
    assert session.run().tokens == base  # taken up again: all features come anew


def test_a_lost_connection_costs_a_split_picture_nothing_but_features(
    tiny_bundle: Bundle, tiny_cloud: Cloud
) -> None:
    base = picture_of(tiny_cloud, opening("a red cat", "base", seed=5))[0]
    message = opening("a red cat", "eagle2", seed=5, options=(("placement", "split"),))
    for frame in (1, 2, 3):
        wire = FaultyTransport(InProcessTransport(tiny_cloud), [Fault("down", frame, "close")])
        assert device_session(tiny_bundle, wire, message).run().tokens == base
        assert len(wire.struck) == 1


def test_a_batch_splits_as_well(tiny_bundle: Bundle) -> None:
    text = tiny_bundle.text.encode("a red cat")
    found = []
    for place in ("colocated", "split"):
        settings = Settings("eagle1-static", seed=3, options=(("placement", place),))
        pictures = Batch(
            tiny_bundle.gpt,
            None,
            text.features[None],
            text.mask[None],
            [settings],
            get_strategy("eagle1-static"),
            [ThresholdConfig("fixed", value=0.9).start(16)],
            eagle=tiny_bundle.eagle,
        ).run()
        found.append(pictures[0])
    assert found[0].tokens == found[1].tokens
    assert found[0].ledger.device_steps == 0 < found[1].ledger.device_steps


def test_drafts_that_a_session_does_not_take(tiny_cloud: Cloud) -> None:
    split = tiny_cloud.open(opening("a red cat", "eagle2", options=(("placement", "split"),)))
    list(split.handle(Draft(0, 0, want=1)))
    with pytest.raises(ProtocolError, match="none where one is"):
        list(split.handle(Draft(1, 1, (3,), (False,))))
    with pytest.raises(ProtocolError, match="drafted tree may have"):
        list(split.handle(Draft(1, 1, (3,) * 16, (False,) * 16, parents=tuple(range(-1, 15)))))
    together = tiny_cloud.open(opening("a red cat", "eagle2"))
    with pytest.raises(ProtocolError, match="tree where none is due"):
        list(together.handle(Draft(0, 0, (3,), (False,), parents=(-1,))))


def test_a_backbone_without_a_drafter_says_so(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "bare"))
    (folder / "eagle.safetensors").unlink()
    cloud = Cloud(load_bundle(folder))
    assert not cloud.bundle.has_eagle
    with pytest.raises(CheckpointError, match="ciar train eagle"):
        cloud.open(opening("a cat", "eagle2"))

    class NoLine:
        def connect(self) -> Any:
            pytest.fail("a connection that nobody would close")

    split = opening("a cat", "eagle2", options=(("placement", "split"),))
    with pytest.raises(CheckpointError, match="ciar train eagle"):
        device_session(cloud.bundle, NoLine(), split).run()


def test_a_device_loads_no_layer_of_the_cloud(tiny_folder: Path, tiny_cloud: Cloud) -> None:
    bundle = load_bundle(tiny_folder)
    message = opening("a red cat", "eagle2", seed=5, options=(("placement", "split"),))
    made = device_session(bundle, InProcessTransport(tiny_cloud), message).run()
    assert made.tokens == picture_of(tiny_cloud, opening("a red cat", "base", seed=5))[0]
    assert "model" not in vars(bundle)
    assert len(bundle.gpt_ends.layers) == 0
    assert tiny_cloud.bundle.gpt_ends is tiny_cloud.bundle.gpt


@pytest.mark.parametrize(
    ("branch", "depth", "fits"), [(4, 4, True), (1, 64, True), (32, 5, False), (64, 64, False)]
)
def test_a_tree_that_no_server_could_judge_is_refused(branch: int, depth: int, fits: bool) -> None:
    asked = Settings("eagle1-static", options=(("branch", branch), ("depth", depth)))
    if fits:
        assert get_strategy("eagle1-static").values(asked).whole("branch") == branch
    else:
        with pytest.raises(InputError, match="Lower one of them"):
            get_strategy("eagle1-static").values(asked)


@pytest.mark.parametrize("name", ["eagle2", "adt-tree"])
@pytest.mark.parametrize(("branch", "depth", "fits"), [(256, 5, True), (16, 64, True), (256, 6, False)])
def test_a_drafter_that_no_server_could_feed_is_refused(
    name: str, branch: int, depth: int, fits: bool
) -> None:
    asked = Settings(name, options=(("branch", branch), ("depth", depth)))
    if fits:
        assert get_strategy(name).values(asked).whole("branch") == branch
    else:
        with pytest.raises(InputError, match="feed the drafter more than 1024"):
            get_strategy(name).values(asked)
