"""Trees: how they grow, laws of the strategies that judge them on toy pictures, and planted faults."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
import pytest
import torch
from law_suite import (
    ALL_THREE,
    CLOUD,
    DEVICES,
    FITS,
    MISFITS,
    PAIRS,
    PLAIN,
    WRONG_RESIDUALS,
    bank,
    driven,
    settings_of,
)
from table_cloud import CODES, LENGTH, BankNoise, TableSession, drawing_from, law_p_value, make_picture
from vector_law import laws, static_tree

import ciar.decoding.acceptance as acceptance
import ciar.decoding.strategies.adt as adt_module
import ciar.decoding.strategies.eagle as eagle_module
import ciar.decoding.trees as trees
from ciar.decoding.sampling import SamplingLaw
from ciar.decoding.strategies.adt import Shape, adapted
from ciar.decoding.strategy import CloudRun, GrowTree, KeepPath, TreePass, get_strategy
from ciar.decoding.trees import Tree, ancestry, best_tree, check_tree, depths_of, draw_distinct, drawn_tree
from ciar.errors import ProtocolError
from ciar.protocol.messages import Draft, Patch

GREEDY = SamplingLaw(temperature=0.0)
SOMETIMES = DEVICES["sometimes"].logits


# --- growing --------------------------------------------------------------------------------------


def grown(half: Any, logits_of: Any) -> tuple[Tree, list[GrowTree]]:
    """A tree whose drafter gives ``logits_of(path)``; and what the drafter was asked."""
    asked: list[GrowTree] = []
    paths: list[tuple[int, ...]] = []
    reply = None
    while True:
        try:
            op = half.send(reply)
        except StopIteration as stop:
            return stop.value, asked
        asked.append(op)
        for token, parent in zip(op.ids, op.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        reply = torch.stack([logits_of(path) for path in paths[len(paths) - len(op.ids) :] or [()]])


def run_at(known: int) -> CloudRun:
    run = CloudRun(settings_of("eagle2"), PLAIN, LENGTH, CODES, BankNoise(bank(), 0))
    run.tokens, run.fed = [1] * known, known - 1
    return run


def peaked(path: tuple[int, ...]) -> torch.Tensor:
    """Laws that differ from path to path, the same for the same path."""
    generator = torch.Generator().manual_seed(hash(path) % 1000)
    return 2.0 * torch.randn(CODES, generator=generator)


def test_depths_and_ancestors() -> None:
    parents = [-1, -1, 0, 2, 1]
    assert depths_of(parents) == [1, 1, 2, 3, 2]
    seen = [{0}, {1}, {0, 2}, {0, 2, 3}, {1, 4}]
    assert [set(row.nonzero()[:, 0].tolist()) for row in ancestry(parents)] == seen


def test_a_drawn_tree_has_its_shape() -> None:
    """Of s siblings the r-th has s // r children: 4, then 4 + 2 + 1 + 1, then 13 (products of ranks to 4)."""
    tree, asked = grown(drawn_tree(run_at(1), 4, 3), peaked)
    assert [depths_of(tree.parents).count(depth) for depth in (1, 2, 3)] == [4, 8, 13]
    assert [len(tree.children(node)) for node in (-1, 0, 1, 2, 3)] == [4, 4, 2, 1, 1]
    assert len(asked) == 3
    assert set(tree.laws) == set(tree.parents)
    for node in tree.laws:
        siblings = [tree.ids[child] for child in tree.children(node)]
        assert len(set(siblings)) == len(siblings)
    chain, _ = grown(drawn_tree(run_at(1), 1, 3), peaked)
    assert chain.parents == [-1, 0, 1]


def test_draws_without_replacement_stay_in_the_support() -> None:
    law = torch.tensor([0.5, 0.0, 0.5, 0.0]).log()
    assert sorted(draw_distinct(law, torch.zeros(4), 4)) == [0, 2]


@pytest.mark.parametrize(
    ("nodes", "branch", "depth"), [(59, 3, 3), (6, 2, 3), (5, 8, 1), (1, 4, 3), (9, 4, 2)]
)
def test_the_best_tree_holds_the_most_likely_paths(nodes: int, branch: int, depth: int) -> None:
    """Against all paths that EAGLE-2's expansion sees, each with the sum of its logarithms."""
    worth: dict[tuple[int, ...], float] = {(): 0.0}
    level: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        fresh = {}
        for path in level:
            law = peaked(path).log_softmax(0)
            for token in law.topk(branch).indices.tolist():
                fresh[(*path, token)] = worth[path] + float(law[token])
        worth |= fresh
        level = sorted(fresh, key=lambda path: -fresh[path])[:branch]
    expected = sorted((path for path in worth if path), key=lambda path: -worth[path])[:nodes]
    tree, asked = grown(best_tree(run_at(1), nodes, branch, depth), peaked)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.ids, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert set(paths) == set(expected)
    # The drafter runs once behind the known token and once a level that has children: depth times in all.
    assert len(asked) == depth
    assert max(map(len, paths)) <= depth


# --- laws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("device", DEVICES)
def test_eagle1_is_exact(pair: str, device: str) -> None:
    """With the cloud's law upon the drafter's own, whatever that is."""
    target, other = PAIRS[pair]
    own = laws(DEVICES[device], other if device == "sometimes" else target)
    q = trees.to_law(own, target)
    many = (pair, device) == ("plain, plain", "sometimes")
    for branch, depth in ((1, 3), (2, 1), (5, 2), (4, 3)) if many else ((3, 3),):
        tokens = static_tree(bank(), laws(CLOUD, target), q, branch, depth)
        assert law_p_value(tokens, CLOUD.joint(target)) > FITS
        for place in ("colocated", "split"):
            options = {"branch": branch, "depth": depth, "placement": place}
            found = driven(settings_of("eagle1-static", target, **options), own, 60)
            np.testing.assert_array_equal(found, tokens[:60])


@pytest.mark.parametrize("pair", ["plain, plain", "all three, top-p", "entropy, plain", "plain, greedy"])
@pytest.mark.parametrize("device", DEVICES)
def test_eagle2_gives_the_pictures_of_base(pair: str, device: str) -> None:
    target, other = PAIRS[pair]
    base = driven(settings_of("base", target), SOMETIMES, 30)
    for nodes, branch, depth, place in ((59, 8, 3, "split"), (4, 2, 2, "colocated"), (4, 2, 2, "split")):
        settings = settings_of("eagle2", target, nodes=nodes, branch=branch, depth=depth, placement=place)
        np.testing.assert_array_equal(driven(settings, laws(DEVICES[device], other), 30), base)


@pytest.mark.parametrize("device", DEVICES)
def test_adt_tree_gives_the_pictures_of_base(device: str) -> None:
    base = driven(settings_of("base", ALL_THREE), SOMETIMES, 30)
    settings = settings_of("adt-tree", ALL_THREE, nodes=12, branch=4, depth=3)
    np.testing.assert_array_equal(driven(settings, laws(DEVICES[device], PLAIN), 30), base)


def test_shapes_of_trees_go_half_the_way() -> None:
    limits = Shape(8, 10)
    assert adapted(Shape(4, 5), 4, True, limits) == Shape(6, 3)
    assert adapted(Shape(4, 5), 0, False, limits) == Shape(2, 8)
    assert adapted(Shape(4, 5), 2, False, limits) == Shape(3, 8)
    deep = wide = Shape(4, 5)
    for _ in range(6):
        deep, wide = adapted(deep, deep.depth, True, limits), adapted(wide, 0, False, limits)
    assert (deep, wide) == (Shape(8, 1), Shape(1, 10))


def test_a_tree_takes_its_shape_from_the_one_beside() -> None:
    """Rows of four tokens: the drafter is always right, so trees grow deeper; a row begins anew."""
    asked: list[tuple[int, int]] = []
    plain = trees.best_tree

    def noting(run: CloudRun, nodes: int, branch: int, depth: int) -> Any:
        asked.append((depth, branch))
        return plain(run, nodes, branch, depth)

    run = run_at(1)
    run.total, run.fed = 16, 0
    half = get_strategy("adt-tree").cloud(
        CloudRun(
            settings_of("adt-tree", GREEDY, depth=4, branch=8), GREEDY, 16, CODES, run.noise, [0], fed=0
        ),
        Draft(0, 1, want=15),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adt_module, "best_tree", noting)
        reply: Any = None
        with contextlib.suppress(StopIteration):
            while True:
                op = half.send(reply)
                reply = None
                if isinstance(op, GrowTree):
                    reply = torch.eye(CODES)[[0] * max(1, len(op.ids))] * 9
                elif isinstance(op, TreePass):
                    reply = torch.eye(CODES)[[0] * (1 + len(op.nodes))] * 9
    # 1 + 3 tokens to the row's end, then rows that begin at depth 2; the widths are 4 where they begin.
    assert asked[0] == (2, 4)
    assert asked[1] == (2, 4)  # position 4 begins a row
    assert (3, 2) in asked


@pytest.mark.parametrize("name", ["eagle1-static", "eagle2"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_drafter_that_is_right_moves_on_by_its_depth_and_one(name: str, depth: int) -> None:
    """Known fault A13, and the off-by-one of a tree's depth; the first token comes from the prefill."""
    settings = settings_of(name, GREEDY, branch=1, depth=depth)
    device, session = make_picture(
        CLOUD, settings, BankNoise(bank(), 0), drawing_from(CLOUD.logits), device_laws=CLOUD.logits
    )
    assert device.tokens == driven(settings_of("base", GREEDY), SOMETIMES, 1)[0].tolist()
    assert len(session.passes) == -(-(LENGTH - 1) // (depth + 1))
    assert device.decided == ["prefix"] * LENGTH
    assert session.run.fed >= LENGTH - 1


@pytest.mark.parametrize("name", ["eagle1-static", "eagle2"])
@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_what_a_split_tree_says_of_itself(name: str, kind: str) -> None:
    """Every drafted token stands, is replaced or discarded; features come once, as asked for."""
    drafted: list[int] = []
    for i in range(40):
        settings = settings_of(name, placement="split", features=kind, branch=3, depth=2)
        sent: list[int] = []

        class Counting(TableSession):
            def answer(self, draft: Draft, sent: list[int] = sent) -> list[Patch]:
                sent.append(len(draft.ids))
                return super().answer(draft)

        device, session = make_picture(
            CLOUD,
            settings,
            BankNoise(bank(), i),
            drawing_from(SOMETIMES),
            device_laws=SOMETIMES,
            session_type=Counting,
        )
        assert device.tokens == session.run.tokens
        assert device.decided == session.run.decided
        assert device.decided[0] == "prefix"
        judged = sum(one in ("accepted", "replaced") for one in device.decided)
        assert sum(sent) == judged + device.discarded
        # Never told: what the cloud has seen of the last round, since nobody drafts behind it.
        assert [told for told, _ in session.told] == [kind] * len(session.told)
        assert 1 <= len(session.told) < LENGTH
        drafted += [one == "accepted" for one in device.decided]
    assert any(drafted)


def test_a_tree_over_a_wire_is_checked() -> None:
    def tree(*parents: int) -> Draft:
        return Draft(0, 0, (1,) * len(parents), (False,) * len(parents), parents=parents)

    check_tree(tree(-1, 0, 1), 3)
    for draft, room in ((tree(-1, 0, 1), 2), (tree(*[-1] * 1025), 4)):
        with pytest.raises(ProtocolError, match="drafted tree may have"):
            check_tree(draft, room)


# --- planted faults -------------------------------------------------------------------------------


def eagle1_misfit(
    count: int = 500, law: SamplingLaw = ALL_THREE, own: torch.Tensor = SOMETIMES, **values: Any
) -> bool:
    settings = settings_of("eagle1-static", law, branch=4, depth=2)
    return law_p_value(driven(settings, own, count, **values), CLOUD.joint(law)) < MISFITS


def eagle2_differs(**values: Any) -> bool:
    settings = settings_of("eagle2", nodes=30, branch=8, depth=3)
    found = driven(settings, SOMETIMES, 40, **values)
    return bool((found != driven(settings_of("base"), SOMETIMES, 40)).any())


def test_without_a_fault_nothing_is_found() -> None:
    assert not eagle1_misfit()
    assert not eagle2_differs()


@pytest.mark.parametrize("kind", WRONG_RESIDUALS)
def test_fault_wrong_residual_between_siblings(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(acceptance, "residual", WRONG_RESIDUALS[kind])
    q = laws(DEVICES["sometimes"], ALL_THREE)
    tokens = static_tree(bank(), laws(CLOUD, ALL_THREE), q, 4, 3)
    assert law_p_value(tokens, CLOUD.joint(ALL_THREE)) < MISFITS
    assert eagle1_misfit()


def test_fault_siblings_as_if_each_were_drawn_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """q keeps the tokens of earlier siblings, though they cannot be drawn twice."""
    sharp = laws(DEVICES["sometimes"], SamplingLaw(temperature=0.4))
    assert not eagle1_misfit(law=PLAIN, own=sharp)
    monkeypatch.setattr(trees, "without", lambda law, token: law)
    assert eagle1_misfit(law=PLAIN, own=sharp)


def test_fault_one_chance_for_all_siblings() -> None:
    shared = copy.copy(bank())
    shared.fresh = torch.from_numpy(shared.accepts)[:, None].expand(-1, LENGTH + 1)
    tokens = static_tree(shared, laws(CLOUD, PLAIN), laws(DEVICES["sometimes"], PLAIN), 4, 3)
    assert law_p_value(tokens, CLOUD.joint(PLAIN)) < MISFITS


class Stale(TableSession):
    """The path's keys are not moved: behind the known tokens lie the first nodes of the tree."""

    def keep_path(self, op: KeepPath) -> None:
        self.cells += self.tree[: len(op.nodes)]


class Crossed(TableSession):
    """A mask under which a node sees the eldest of its parent's generation in its parent's place."""

    def tree_pass(self, op: TreePass) -> torch.Tensor:
        depths = depths_of(op.parents)
        eldest = [depths.index(depths[parent]) if parent >= 0 else -1 for parent in op.parents]
        return super().tree_pass(TreePass(op.start, op.ids, op.nodes, eldest))


@pytest.mark.parametrize("session", [Stale, Crossed])
def test_fault_cells_and_masks(session: type[TableSession]) -> None:
    assert eagle2_differs(session_type=session)
    assert eagle1_misfit(session_type=session)


def test_fault_laws_of_a_tree_from_other_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split: the cloud judges siblings by the law of another node than they were drawn behind."""
    plain = eagle_module.laws_of_drawn

    def mixed(run: CloudRun, tree: Tree) -> Any:
        done = yield from plain(run, tree)
        done.laws = {node: done.laws[min(0, node)] for node in done.laws}
        return done

    settings = settings_of("eagle1-static", PLAIN, branch=3, depth=3, placement="split")
    fits = law_p_value(driven(settings, SOMETIMES, 500), CLOUD.joint(PLAIN))
    monkeypatch.setattr(eagle_module, "laws_of_drawn", mixed)
    assert law_p_value(driven(settings, SOMETIMES, 500), CLOUD.joint(PLAIN)) < MISFITS < fits


def test_fault_a_path_told_one_node_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(run: Any, path: list[int]) -> Any:
        known = run.fed
        run.decided += ["prefix"] * (len(run.tokens) - known)
        run.fed += len(path)
        yield KeepPath(known, tuple(path[:-1]))

    monkeypatch.setattr(trees, "_keep", short)
    with pytest.raises(AssertionError):
        eagle2_differs()
