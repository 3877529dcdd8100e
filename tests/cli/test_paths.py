"""Names of files, and the checks that come before the work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciar.cli.paths import BESIDE, Target, check_writable, plan, slug
from ciar.errors import InputError


@given(st.text(max_size=200))
def test_a_slug_is_a_safe_file_name(prompt: str) -> None:
    made = slug(prompt)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", made)
    assert len(made) <= 40
    assert slug(made) == made


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("A smiling cat, with SUNGLASSES!", "a-smiling-cat-with-sunglasses"),
        ("Crème brûlée", "creme-brulee"),
        ("../../etc/passwd", "etc-passwd"),
        ("猫", "picture"),
        ("x" * 100, "x" * 40),
        ("a" * 39 + " b", "a" * 39),
    ],
)
def test_slugs(prompt: str, expected: str) -> None:
    assert slug(prompt) == expected


def test_one_picture_is_not_numbered(folder: Path) -> None:
    assert plan(["a cat"], 1, 7, None, None) == [Target(Path("ciar-a-cat-7.png"), None)]
    assert plan(["a cat"], 1, 7, None, BESIDE) == [
        Target(Path("ciar-a-cat-7.png"), Path("ciar-a-cat-7-heat.png"))
    ]
    assert plan(["a cat"], 1, 7, "b.jpg", "h.png") == [Target(Path("b.jpg"), Path("h.png"))]


def test_several_pictures_are_numbered_over_all_prompts(folder: Path) -> None:
    names = [str(target.picture) for target in plan(["a cat", "a cat"], 5, 7, None, None)]
    assert names == [f"ciar-a-cat-7-{i:02d}.png" for i in range(1, 11)]
    targets = plan(["a", "b"], 1, 7, "x.png", "y.webp")
    assert [str(t.picture) for t in targets] == ["x-1.png", "x-2.png"]
    assert [str(t.heatmap) for t in targets] == ["y-1.webp", "y-2.webp"]


def test_a_folder_takes_the_default_names(folder: Path) -> None:
    (folder / "out").mkdir()
    assert plan(["a cat"], 1, 7, "out", BESIDE) == [
        Target(Path("out/ciar-a-cat-7.png"), Path("out/ciar-a-cat-7-heat.png"))
    ]
    assert plan(["a cat"], 1, 7, "new/", None) == [Target(Path("new/ciar-a-cat-7.png"), None)]
    assert plan(["a cat"], 1, 7, "a.png", "out")[0].heatmap == Path("out/ciar-a-cat-7-heat.png")


@given(
    prompts=st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=4),
    count=st.integers(1, 12),
    heatmap=st.sampled_from([None, BESIDE, "h.png"]),
    out=st.sampled_from([None, "o.png", "new/"]),
)
def test_no_two_files_share_a_name(
    prompts: list[str], count: int, heatmap: str | None, out: str | None
) -> None:
    targets = plan(prompts, count, 2**64 - 1, out, heatmap)
    paths = [path for target in targets for path in (target.picture, target.heatmap) if path is not None]
    assert len(targets) == count * len(prompts)
    assert len(set(paths)) == len(paths)
    assert len({path.parent for path in paths} - {Path(), Path("new")}) == 0


@pytest.mark.parametrize("name", ["picture", "picture.gif", "picture.png.txt", ".png", "/dev/null"])
def test_what_is_no_picture_file_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"neither a folder that exists nor a picture file.*\.png"):
        plan(["a cat"], 1, 7, name, None)


def test_writable_checks(folder: Path) -> None:
    (folder / "there.png").write_bytes(b"x")
    (folder / "folder.png").mkdir()
    check_writable([Target(Path("new.png"), Path("heat.png"))], force=False)
    check_writable([Target(Path("there.png"), None)], force=True)
    for target, message in [
        (Target(Path("there.png"), None), "--force"),
        (Target(Path("new.png"), Path("there.png")), "--force"),
        (Target(Path("missing/new.png"), None), "mkdir -p missing"),
        (Target(Path("new.png"), Path("missing/heat.png")), "mkdir -p missing"),
        (Target(Path("there.png/new.png"), None), "does not exist"),
        (Target(Path("folder.png"), None), "is a folder"),
        (Target(Path("new.png"), Path("./new.png")), "the same file"),
    ]:
        with pytest.raises(InputError, match=re.escape(message)):
            check_writable([target], force=False)


def test_a_closed_folder_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(InputError, match="cannot be written to"):
        check_writable([Target(Path("new.png"), None)], force=True)
