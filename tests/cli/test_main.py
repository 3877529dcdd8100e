"""Help, hints, exit codes, and how the process ends."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ciar import errors
from ciar.cli import main as main_module
from ciar.cli.main import COMMANDS, build_parser, main
from ciar.cli.parser import Command

from .conftest import SOURCE, python

Ciar = Callable[..., tuple[int, str, str]]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes ``ciar strategies`` raise."""

    def set_error(error: BaseException) -> None:
        def run(options: argparse.Namespace) -> int:
            raise error

        command = Command("fails", lambda parser: None, run)
        monkeypatch.setitem(main_module.COMMANDS, "strategies", command)

    return set_error


def test_help_teaches(ciar: Ciar) -> None:
    code, out, err = ciar("--help")
    assert (code, err) == (0, "")
    assert out.count("ciar generate") >= 3
    for name, command in COMMANDS.items():
        assert any(line.split() == [name, *command.help.split()] for line in out.splitlines())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(ciar: Ciar, name: str) -> None:
    code, out, err = ciar(name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: ciar {name}")


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = "import sys; from ciar.cli.main import main; main(['--help']); print('HEAVY', *(m for m in "
    code += "('torch', 'numpy', 'PIL', 'ciar.pipeline', 'ciar.models', 'ciar.decoding') if m in sys.modules))"
    began = time.perf_counter()
    done = python(code)
    seconds = time.perf_counter() - began
    assert done.stdout.splitlines()[-1] == "HEAVY"
    assert seconds < 2.0  # 0.13 s on a quiet machine; torch alone takes longer than this


def test_no_command_shows_the_help_and_is_an_error(ciar: Ciar) -> None:
    code, out, err = ciar()
    assert (code, out) == (2, "")
    assert "examples:" in err


def test_version(ciar: Ciar) -> None:
    from ciar.version import __version__

    assert ciar("--version") == (0, f"ciar {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["generate", "x", "--guidence", "3"], "Did you mean --guidance?"),
        (["generate", "x", "--guidence=3"], "Did you mean --guidance?"),
        (["generate", "x", "--temp", "3"], "Did you mean --temperature?"),
        (["generat", "x"], "Did you mean generate?"),
        (["train", "tokeniser"], "Did you mean tokenizer?"),
        (["train", "backbone", "--step", "3"], "Did you mean --steps?"),
        (["generate", "x", "--action", "replce"], "Did you mean replace?"),
        (["generate", "x", "--payload", "zip"], "Known: ids, features"),
        (["serve", "--max-session", "3"], "Did you mean --max-sessions?"),
        (["draw", "x"], "Known: generate, serve"),
        (["train"], "data, text, tokenizer, codebook, codes, backbone, device, eagle, gate, dual-encoder"),
        (["eval"], "name the evaluation"),
        (["--guidence"], "there is no option --guidence"),
        (["generate", "a cat", "--seed", "1", "a dog"], "'a dog' was not expected here"),
        (["generate", "-cat"], "write -- '-cat'"),
        (["generate", "x", "--seed"], "expected one argument"),
    ],
)
def test_wrong_words_get_a_hint_and_code_2(ciar: Ciar, words: list[str], hint: str) -> None:
    code, out, err = ciar(*words)
    assert (code, out) == (2, "")
    assert hint in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        errors.CiarError("x"),
        errors.InputError("x"),
        errors.DataError("x"),
        errors.CheckpointError("x"),
        errors.NumericalError("x"),
        errors.CloudUnavailable("x"),
        errors.ServerBusy("x"),
        errors.ProtocolError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_ciar_errors_are_one_line_with_their_exit_code(
    ciar: Ciar, failing: Callable[[BaseException], None], error: errors.CiarError
) -> None:
    error.args = ("Two\nlines and an escape \x1b[2J here.",)
    failing(error)
    code, out, err = ciar("strategies")
    assert (code, out) == (error.exit_code, "")
    assert err == "error: Two lines and an escape  [2J here.\n"


def test_unexpected_errors_point_to_debug(ciar: Ciar, failing: Callable[[BaseException], None]) -> None:
    failing(ZeroDivisionError("by zero"))
    code, out, err = ciar("strategies")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "ZeroDivisionError: by zero" in err
    assert "--debug" in err


@pytest.mark.parametrize("words", [["--debug", "strategies"], ["strategies", "--debug"]])
@pytest.mark.parametrize(("error", "expected"), [(KeyError("k"), 1), (errors.DataError("d"), 3)])
def test_debug_shows_the_traceback(
    ciar: Ciar, failing: Callable[[BaseException], None], words: list[str], error: Exception, expected: int
) -> None:
    failing(error)
    code, _, err = ciar(*words)
    assert code == expected
    assert "Traceback (most recent call last)" in err
    assert err.splitlines()[-1].startswith("error: ")


def test_ctrl_c_is_130_without_traceback(ciar: Ciar, failing: Callable[[BaseException], None]) -> None:
    failing(KeyboardInterrupt())
    assert ciar("strategies") == (130, "", "interrupted\n")


def test_ctrl_c_in_a_real_process(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom ciar.cli import generate, main\n"
        "def slow(*a, **k):\n    print('loading', flush=True)\n    time.sleep(30)\n"
        "generate.load_pipeline = slow\nsys.exit(main.main(['generate', 'a cat']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "interrupted\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["--help"], ["doctor", "--help"]])
def test_a_closed_pipe_is_quiet(words: list[str]) -> None:
    code = f"import sys; from ciar.cli.main import main; sys.stdin.read(); sys.exit(main({words!r}))"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdout.close()  # the reader is gone before the first byte
    process.stdin.close()
    err = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=30)
    assert err == b""


def test_a_result_that_nobody_reads_is_141() -> None:
    code = (
        "import os, sys\nfrom ciar.cli.main import main\nfrom ciar.cli import main as m\n"
        "from ciar.cli.output import say\nfrom ciar.cli.parser import Command\n"
        "def run(options):\n    for _ in range(9):\n        say('line')\n    return 0\n"
        "m.COMMANDS['doctor'] = Command('x', lambda parser: None, run)\n"
        "r, w = os.pipe(); os.close(r); os.dup2(w, 1)\nsys.exit(main(['doctor']))"
    )
    done = python(code)
    assert (done.returncode, done.stderr) == (141, "")


def test_text_that_the_terminal_cannot_show_is_spelled_out() -> None:
    code = (
        "import sys\nfrom ciar.cli.main import main\n"
        "sys.exit(main(['generate', 'x', '--out', '\\u732b\\udcff/']))"
    )
    done = python(code, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.returncode == 2
    assert "\\u732b" in done.stderr
    assert "Traceback" not in done.stderr


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ciar", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    assert done.stdout.startswith("ciar ")


def test_main_without_arguments_reads_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ciar", "--version"])
    assert main() == 0


def test_every_option_has_help() -> None:
    def silent(parser: argparse.ArgumentParser) -> list[str]:
        found: list[str] = []
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += [line for sub in action.choices.values() for line in silent(sub)]
            elif not action.help:
                found.append(f"{parser.prog} {action.dest}")
        return found

    assert silent(build_parser()) == []
