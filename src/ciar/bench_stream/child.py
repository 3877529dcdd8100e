"""A helper process that is told what to do in one JSON line, says in one that it is ready, and ends with us.

It ends when its standard input does, so it never outlives this process, whatever ends that.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Any, Self

from ciar.errors import CiarError, InputError

#: How long a process may take to be ready, which includes reading a model, and to end.
READY_S, END_S = 300.0, 10.0

Wrap = Callable[[Sequence[str]], list[str]]


class Child:
    """``python -m module`` as a context manager.

    Args:
        module: what to run.
        order: what it is told.
        wrap: puts a command around it.

    Attributes:
        answer: what it said when it was ready.
    """

    def __init__(self, module: str, order: dict[str, Any], wrap: Wrap = list) -> None:
        self.answer: dict[str, Any] = {}
        self._command = wrap([sys.executable, "-m", module])
        self._order = order
        self._process: subprocess.Popen[str] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        # A file and not a pipe: nobody reads what it says unless it fails.
        said = self._stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,  # Ctrl-C is for us; it ends when its input does
        )
        patience = threading.Timer(READY_S, self._process.kill)
        patience.start()
        try:
            self.answer = self._greet(said)
        except BaseException:
            self.close()
            raise
        finally:
            patience.cancel()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _greet(self, said: IO[str]) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended; what it said explains why
            process.stdin.write(json.dumps(self._order) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            said.seek(0)
            words = said.read().strip().splitlines() or ["it does not say why"]
            raise CiarError(f"A process of the benchmark ended before it was ready ({words[-1].strip()}).")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise InputError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process; safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        finally:
            self._stack.close()
