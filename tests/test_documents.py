"""Documents against the code: links, commands, versions, and what the package says of itself."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from ciar.cli.main import COMMANDS, build_parser
from ciar.version import __version__

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/*/*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]


def links(text: str) -> list[str]:
    """Targets of Markdown links and pictures, and of src and href attributes, outside code blocks."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found: list[str] = re.findall(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", prose)
    return found + re.findall(r"(?:src|href)=\"([^\"]+)\"", prose)


def blocks(text: str, language: str) -> list[str]:
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return found


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def shell_commands(text: str) -> list[list[str]]:
    """Words of every command in the bash blocks, without redirections and comments."""
    lines = [line for block in blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(re.split(r"\s[<>|]", line)[0], comments=True))]


def test_the_documents_are_found() -> None:
    assert {"README.md", "CHANGELOG.md", "docs/index.md", "docs/glossary.md"} <= set(NAMES)
    assert sum(bool(shell_commands(path.read_text(encoding="utf-8"))) for path in DOCUMENTS) >= 2


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    document = ROOT / name
    for target in links(document.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = document.parent / file if file else document
        assert path.exists(), f"{name} links to {target}"
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), f"{name} links to {target}"


@pytest.mark.parametrize("name", NAMES)
def test_commands_parse(name: str) -> None:
    """Every ``ciar`` line is a command line that the real parser takes; every ``make`` target exists."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for words in shell_commands((ROOT / name).read_text(encoding="utf-8")):
        if words[0] == "ciar":
            options = build_parser().parse_args(words[1:])
            assert callable(options.run)
        elif words[0] == "make":
            assert set(words[1:]) <= set(targets)
        else:
            assert words[0] in {"pip", "npm", "git", "cd", "mkdir"}, f"{name} shows {words}"


def test_the_help_examples_parse() -> None:
    texts = [build_parser().epilog or "", *(command.epilog for command in COMMANDS.values())]
    shown = [line.strip() for text in texts for line in text.splitlines() if "ciar " in line]
    commands = [line for line in shown if re.match(r"([A-Z_]+=\S+ )?ciar [a-z]", line)]
    assert len(commands) >= 8
    for line in commands:
        words = shlex.split(re.split(r"\s[<>|]", line)[0])
        build_parser().parse_args(words[words.index("ciar") + 1 :])


@pytest.mark.parametrize("name", NAMES)
def test_python_blocks_are_python(name: str) -> None:
    for block in blocks((ROOT / name).read_text(encoding="utf-8"), "python"):
        ast.parse(block)


def test_versions_agree() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d[^\]]*)\]", changelog, flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.*)$", citation, flags=re.MULTILINE)[1] == __version__  # type: ignore[index]


def test_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [name for name in COMMANDS if f"`ciar {name}`" not in readme]


def project() -> dict[str, object]:
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def requirement_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", one)[0].lower() for one in requirements}


def test_no_tool_of_tests_or_training_is_needed_at_run_time() -> None:
    table = project()
    runtime = requirement_names(table["dependencies"])  # type: ignore[arg-type]
    extras = table["optional-dependencies"]
    tools = requirement_names(extras["dev"]) | requirement_names(extras["train"])  # type: ignore[index]
    assert not runtime & tools


def test_constraints_pin_every_direct_dependency() -> None:
    table = project()
    direct = requirement_names(table["dependencies"])  # type: ignore[arg-type]
    for extra in table["optional-dependencies"].values():  # type: ignore[attr-defined]
        direct |= requirement_names(extra)
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line}
    assert pinned == direct - {"ciar"}


def test_the_notice_names_every_source() -> None:
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    for name in ("Noto Emoji", "Fluent Emoji", "Twemoji", "CC BY 4.0", "emojilib", "all-MiniLM-L6-v2"):
        assert name in notice
