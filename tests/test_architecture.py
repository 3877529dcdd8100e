"""Which part may import which: the table, the arrows in the source, and what must stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
#: Everyone may know these: they are words, and know nothing themselves.
VOCABULARY = {"errors", "files", "version"}
ALL = {path.stem for path in (SOURCE / "ciar").iterdir() if path.suffix == ".py" or path.is_dir()}
#: Part -> the parts (or single modules of a part) that it may import, beside the vocabulary and itself.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "version": set(),
    "noise": set(),
    "ledger": set(),
    "protocol": set(),
    "intervals": set(),
    "models": {"intervals"},
    "decoding": {"intervals", "models", "noise", "ledger", "protocol"},
    "device": {"decoding", "intervals", "models", "ledger", "protocol", "transport.base"},
    "cloud": {"decoding", "intervals", "models", "ledger", "protocol"},
    "transport": {"protocol"},
    "network": set(),
    "planner": {"decoding.pacing", "ledger", "protocol", "transport.base"},
    "serving": {"cloud", "transport", "protocol"},
    "training": {"intervals", "models", "decoding", "noise", "ledger", "protocol", "evaluation"},
    "evaluation": {"intervals", "models", "ledger"},
    "pipeline": ALL
    - {
        "cli",
        "tuning",
        "pipeline",
        "bench",
        "footprint",
        "bench_stream",
        "compare",
        "quality",
        "serving",
        "training",
    },
    "bench": ALL
    - {"cli", "tuning", "bench", "footprint", "bench_stream", "compare", "quality", "serving", "training"},
    "quality": ALL
    - {
        "cli",
        "tuning",
        "bench",
        "bench_stream",
        "footprint",
        "compare",
        "quality",
        "pipeline",
        "serving",
        "device",
        "cloud",
        "transport",
    },
    "compare": ALL - {"cli", "tuning", "bench", "bench_stream", "footprint", "compare", "serving"},
    "bench_stream": ALL - {"cli", "training", "footprint"},
    "footprint": ALL - {"cli", "bench_stream", "compare", "quality", "serving", "training", "footprint"},
    "tuning": {"compare", "quality", "decoding", "models"},
    "cli": ALL | {"bench"},
    "__main__": {"cli"},
    # The public names, looked up when they are asked for.
    "__init__": {"pipeline"},
}
LONGEST_FILE = 600
#: Modules that a device without torch, and a fast command line, rely on.
LIGHT = (
    *("ciar", "ciar.protocol.codec", "ciar.noise", "ciar.transport.base", "ciar.cli.main"),
    *("ciar.planner.drive", "ciar.planner.probe"),
)
HEAVY = {"torch", "transformers", "matplotlib", "starlette", "uvicorn"}


def python_files() -> list[Path]:
    return sorted((SOURCE / "ciar").rglob("*.py"))


def part_of(module: str) -> str:
    """``ciar.models.gpt`` -> ``models``; ``ciar`` itself -> ``__init__``."""
    return module.split(".")[1] if "." in module else "__init__"


def imported_modules(tree: ast.AST, package: str, known: set[str]) -> Iterator[tuple[int, str]]:
    """Line and full name of every ``ciar`` module that a syntax tree imports, wherever it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            # "from ciar import pipeline" imports a module, "from ciar.errors import X" a name.
            names = [
                f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names
            ]
        else:
            continue
        for name in names:
            if name == "ciar" or name.startswith("ciar."):
                yield node.lineno, name


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def known_modules() -> set[str]:
    return {module_name(path) for path in python_files()}


def arrows(source: str, module: str, package: str, known: set[str]) -> list[str]:
    """A sentence for every import that the table does not allow."""
    part = part_of(module)
    may = ALLOWED[part] | (VOCABULARY - {part} if part not in VOCABULARY else set()) | {part}
    return [
        f"{module}:{line} imports {name}; {part} may not know {part_of(name)}"
        for line, name in imported_modules(ast.parse(source), package, known)
        if part_of(name) not in may and name.removeprefix("ciar.") not in may
    ]


def test_every_part_is_in_the_table() -> None:
    parts = {part_of(module_name(path)) for path in python_files()}
    assert parts <= ALLOWED.keys(), "a new part needs a row in ALLOWED"


def test_no_import_against_the_table() -> None:
    known = known_modules()
    wrong: list[str] = []
    for path in python_files():
        module = module_name(path)
        package = module if path.stem == "__init__" else module.rpartition(".")[0]
        wrong += arrows(path.read_text(encoding="utf-8"), module, package, known)
    assert not wrong, "\n".join(wrong)


def test_the_table_has_no_circle() -> None:
    # Kahn's algorithm: take away parts that know nothing but parts already taken away.
    rest = {
        part: may - {part} for part, may in ALLOWED.items() if part not in ("__init__", "cli", "__main__")
    }
    while rest:
        free = {part for part, may in rest.items() if not may & rest.keys()}
        assert free, f"these know each other: {sorted(rest)}"
        rest = {part: may for part, may in rest.items() if part not in free}


@pytest.mark.parametrize(
    ("statement", "wrong"),
    [
        ("import ciar.cloud.engine", True),
        ("from ciar.transport.websocket import WebSocketTransport", True),
        ("from ciar.transport.base import Transport", False),
        ("from ciar.cloud import engine", True),
        ("from ..cloud.engine import CloudEngine", True),
        ("from ciar import cloud", True),
        ("def f():\n    from ciar.cli.main import main", True),
        ("if TYPE_CHECKING:\n    import ciar.serving", True),
        ("from ciar.decoding.strategy import Strategy", False),
        ("from .session import DeviceSession", False),
        ("from ciar.errors import CiarError", False),
        ("import torch", False),
    ],
)
def test_the_check_finds_arrows(statement: str, wrong: bool) -> None:
    known = known_modules() | {"ciar.cloud", "ciar.cloud.engine"}
    assert bool(arrows(statement, "ciar.device.session", "ciar.device", known)) == wrong


def test_no_file_is_too_long() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    too_long = {str(path): length for path, length in lengths.items() if length > LONGEST_FILE}
    assert not too_long


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {HEAVY!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []


def test_public_names_exist() -> None:
    import ciar

    for name in ciar.__all__:
        assert getattr(ciar, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Pipelin'"):
        _ = ciar.Pipelin  # type: ignore[attr-defined]
