"""Trees of drafted tokens: how they grow, and which path of one stands.

A tree begins behind the last known token. Its nodes are numbered so that a parent comes before its
children, and children of one parent are in the order in which they were drafted; -1 is the known token.
Sources: EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858; sampling without replacement over siblings as
in recursive speculative decoding, arXiv 2402.14160.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ciar.decoding.acceptance import Rule
from ciar.decoding.sampling import choose, to_law
from ciar.decoding.strategy import CloudRun, DeviceRun, GrowTree, KeepPath, Noise, TreePass
from ciar.errors import ProtocolError
from ciar.protocol.messages import Draft, depths_of


@dataclass
class Tree:
    """Drafted tokens.

    Attributes:
        ids: the nodes' tokens.
        parents: for each the number of its parent.
        laws: for each node with children, by number, the law that they were drawn from, float32 [vocab].
    """

    ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    laws: dict[int, Tensor] = field(default_factory=dict)

    def add(self, token: int, parent: int) -> int:
        """A further node; returns its number."""
        self.ids.append(token)
        self.parents.append(parent)
        return len(self.ids) - 1

    def children(self, node: int) -> list[int]:
        """Numbers of a node's children, in drafting order."""
        return [child for child, parent in enumerate(self.parents) if parent == node]


#: Most tokens of a tree: more would take a server's memory for one client.
MOST_NODES = 1024


def check_tree(draft: Draft, room: int) -> None:
    """Checks the size of a tree that came over a wire.

    Args:
        room: tokens that the picture has left.

    Raises:
        ProtocolError: it has too many tokens, or a path of more than ``room``.
    """
    if len(draft.ids) > MOST_NODES or draft.span > room:
        raise ProtocolError(
            f"A drafted tree may have {MOST_NODES} tokens, and paths of the {room} tokens that are left."
        )


def ancestry(parents: list[int]) -> Tensor:
    """bool [nodes, nodes]: which nodes a node sees, its ancestors and itself."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


# --- growing --------------------------------------------------------------------------------------


def draw_distinct(law: Tensor, noise: Tensor, count: int) -> list[int]:
    """Draws without replacement, as far as the support goes: the largest of law and Gumbel noise.

    Args:
        law: float32 [vocab].
        noise: float32 [vocab].
        count: at least 1.

    Returns:
        Distinct tokens in the order in which one draw after the other would give them.
    """
    top = (law + noise).topk(min(count, len(law)))
    return top.indices[top.values > -torch.inf].tolist()


def drawn_tree(run: CloudRun | DeviceRun, branch: int, depth: int) -> Generator[Any, Any, Tree]:
    """A tree of a fixed shape whose children are drawn without replacement from the drafter's law.

    The known token has ``branch`` children; of s siblings the r-th has s // r children of its own. With
    ``branch`` 1 it is a chain.

    Args:
        depth: tokens of the longest path, at least 1.
    """
    assert run.noise is not None, "a half that draws trees is given the picture's noise"
    tree, fed = Tree(), {-1: -1}
    shares = {-1: branch}
    level = [-1]
    logits: Tensor = yield GrowTree()
    for distance in range(depth):
        laws = to_law(logits, run.law, what="the EAGLE drafter")
        noise = run.noise.gumbel(len(run.tokens) + distance, 1)[0]
        fresh: list[int] = []
        for node, law in zip(level, laws, strict=True):
            tree.laws[node] = law
            for rank, token in enumerate(draw_distinct(law, noise, shares[node]), 1):
                child = tree.add(token, node)
                shares[child] = shares[node] // rank
                fresh.append(child)
        level = fresh
        if distance + 1 < depth:
            logits = yield _feed(tree, level, fed)
    return tree


def laws_of_drawn(run: CloudRun, tree: Tree) -> Generator[Any, Any, Tree]:
    """A tree that the device has drawn, with the laws that its nodes' children were drawn from.

    They are those of the drafter's copy here, level by level as :func:`drawn_tree` went.
    """
    depths, fed = depths_of(tree.parents), {-1: -1}
    logits: Tensor = yield GrowTree()
    level = [-1]
    for depth in range(1, max(depths) + 1):
        tree.laws |= zip(level, to_law(logits, run.law, what="the EAGLE drafter"), strict=True)
        level = [node for node, own in enumerate(depths) if own == depth]
        if depth < max(depths):
            logits = yield _feed(tree, level, fed)
    return tree


def best_tree(run: CloudRun | DeviceRun, nodes: int, branch: int, depth: int) -> Generator[Any, Any, Tree]:
    """The most likely nodes of a tree that grows where the drafter is sure (EAGLE-2).

    A node is worth the log-probability of its path. The best ``branch`` of each level get ``branch``
    children each; of all that were seen the best ``nodes`` are kept, and since nobody is worth more than
    its parent, they are a tree.

    Args:
        depth: tokens of the longest path, at least 1.
    """
    seen, fed = Tree(), {-1: -1}
    worth = {-1: 0.0}
    level = [-1]
    logits: Tensor = yield GrowTree()
    for distance in range(depth):
        # The drafter's confidence, so without the temperature and the filters of the picture's law.
        top = logits.log_softmax(dim=-1).topk(min(branch, logits.shape[-1]), dim=-1)
        fresh: list[int] = []
        for node, values, tokens in zip(level, top.values.tolist(), top.indices.tolist(), strict=True):
            for value, token in zip(values, tokens, strict=True):
                if value > -torch.inf:
                    child = seen.add(token, node)
                    worth[child] = worth[node] + value
                    fresh.append(child)
        level = sorted(fresh, key=lambda node: -worth[node])[:branch]
        if distance + 1 < depth:
            logits = yield _feed(seen, level, fed)
    kept = sorted(sorted(range(len(seen.ids)), key=lambda node: -worth[node])[:nodes])
    number = {-1: -1} | {node: i for i, node in enumerate(kept)}
    return Tree([seen.ids[node] for node in kept], [number[seen.parents[node]] for node in kept])


def _feed(tree: Tree, level: list[int], fed: dict[int, int]) -> GrowTree:
    """Feeds nodes to the drafter, whose numbers ``fed`` are its own."""
    parents = tuple(fed[tree.parents[node]] for node in level)
    for node in level:
        fed[node] = len(fed) - 1
    return GrowTree(tuple(tree.ids[node] for node in level), parents)


# --- judging --------------------------------------------------------------------------------------


def tree_laws(run: CloudRun, tree: Tree) -> Generator[Any, Any, Tensor]:
    """The cloud's laws behind the last known token and behind each node: float32 [1 + nodes, vocab]."""
    logits: Tensor = yield TreePass(run.fed, run.tokens[run.fed :], tree.ids, tree.parents)
    run.fed = len(run.tokens)
    return to_law(logits, run.law, what=f"the cloud model at positions {len(run.tokens)} on")


def judge_siblings(
    p: Tensor, q: Tensor, tokens: list[int], rule: Rule, noise: Noise, position: int, depth: int
) -> tuple[int | None, Tensor]:
    """Judges siblings one after the other; each is drawn from q without those before it.

    After a rejection the rule's redraw is what the next sibling is held against.

    Args:
        p, q: laws of cloud and drafter at the position, float32 [vocab].
        tokens: the siblings' tokens, in drafting order.
        depth: how many tokens of the same path came before.

    Returns:
        Which sibling stands, and if none does the law that the position's token is drawn from.
    """
    for i, token in enumerate(tokens):
        # The first test is a chain's; the others have chances of their own.
        chance = float(noise.fresh(position, 1, i)[0]) if i else noise.accept(position)
        if chance < rule.accept(p, q, token, depth):
            return i, p
        p = rule.redraw(p, q, token)
        q = without(q, token)
    return None, p


def without(law: Tensor, token: int) -> Tensor:
    """A law given that a token is not drawn; all minus infinity where it was sure."""
    left = law.clone()
    left[token] = -torch.inf
    return left.log_softmax(dim=-1) if bool((left > -torch.inf).any()) else left


def walk_drawn(run: CloudRun, tree: Tree, p: Tensor, rule: Rule, end: int) -> Generator[Any, Any, None]:
    """The path of a drawn tree that stands becomes known, and a token of the cloud's own behind it.

    Args:
        p: laws of :func:`tree_laws`.
        end: position where the picture, or what was asked for, ends.
    """
    path: list[int] = []
    node, stopped = -1, False
    while len(run.tokens) < end and not stopped:
        position, siblings = len(run.tokens), tree.children(node)
        law, found = p[node + 1], None
        if siblings:
            tokens = [tree.ids[child] for child in siblings]
            q = tree.laws[node].to(law.device)
            found, law = judge_siblings(law, q, tokens, rule, run.noise, position, len(path))
        if found is None:
            noise = run.noise.residual(position) if siblings else run.noise.gumbel(position, 1)[0]
            run.tokens.append(int(choose(law, noise)))
            stopped = True
        else:
            node = siblings[found]
            path.append(node)
            run.tokens.append(tree.ids[node])
    yield from _keep(run, path)


def walk_chosen(run: CloudRun, tree: Tree, p: Tensor, end: int) -> Generator[Any, Any, None]:
    """The cloud's own tokens under the picture's noise, as far as the tree has foreseen them and one more.

    Children that were not drawn stand one after the other with what p gives them, the others taken out:
    that is a draw from p which is looked up among them, and here the draw is plain AR's.
    """
    path: list[int] = []
    node: int | None = -1
    while len(run.tokens) < end and node is not None:
        position = len(run.tokens)
        token = int(choose(p[node + 1], run.noise.gumbel(position, 1)[0]))
        run.tokens.append(token)
        node = next((child for child in tree.children(node) if tree.ids[child] == token), None)
        if node is not None:
            path.append(node)
    yield from _keep(run, path)


def tell_deciders(run: CloudRun, tree: Tree, start: int) -> None:
    """Writes who decided the tokens from ``start`` on of a tree that the device has drafted."""
    node = -1
    for position in range(start, len(run.tokens)):
        children = tree.children(node)
        found = next((child for child in children if tree.ids[child] == run.tokens[position]), None)
        run.decided[position] = "accepted" if found is not None else "replaced" if children else "prefix"
        node = len(tree.ids) if found is None else found


def _keep(run: CloudRun, path: list[int]) -> Generator[KeepPath, None, None]:
    known = run.fed
    run.decided += ["prefix"] * (len(run.tokens) - known)
    run.fed += len(path)
    yield KeepPath(known, tuple(path))
