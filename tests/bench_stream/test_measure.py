"""The benchmark itself, on a tiny model: real sockets, a relay, a cloud with a tempo."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ciar.bench_stream.child import Child
from ciar.bench_stream.figures import figures
from ciar.bench_stream.lines import Ends, RelayLines, echo_ms, lines_of
from ciar.bench_stream.measure import Plan, measure
from ciar.bench_stream.records import Records
from ciar.bench_stream.rows import rows_of
from ciar.cli.main import main
from ciar.cloud.paced import Tempo, pace
from ciar.cloud.sessions import Cloud
from ciar.errors import CiarError, CloudUnavailable, InputError
from ciar.models.bundle import Bundle, load_bundle
from ciar.network.relay import BackgroundRelay
from ciar.network.shape import Shape
from ciar.serving.run import BackgroundServer

TEMPO = (3.0, 0.25)


class NearLines:
    """Lines without further processes.

    Attributes:
        shapes: the networks that were asked for.
    """

    kind, detail = "relay", "In this process."

    def __init__(self, server: BackgroundServer) -> None:
        self.server = server
        self.shapes: list[Shape] = []

    def __enter__(self) -> NearLines:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    @contextmanager
    def at(self, shape: Shape) -> Iterator[Ends]:
        self.shapes.append(shape)
        parts = urlsplit(self.server.url)
        with BackgroundRelay(shape, str(parts.hostname), parts.port or 0) as relay:
            yield Ends(f"ws://127.0.0.1:{relay.port}")


@pytest.fixture(scope="module")
def bundle(wide_folder: Path) -> Bundle:
    return load_bundle(wide_folder)


@pytest.fixture(scope="module")
def server(wide_folder: Path) -> Iterator[BackgroundServer]:
    cloud = pace(Cloud(load_bundle(wide_folder)), Tempo(*TEMPO))
    with BackgroundServer(cloud) as found:
        yield found


def test_rows_take_turns_over_a_slow_network(
    bundle: Bundle, server: BackgroundServer, tmp_path: Path
) -> None:
    rows = rows_of("scd lossless ciar-stream auto:wish=exact")
    plan = Plan(rows, (0.0, 40.0), Shape(jitter_ms=0.5), pictures=2, seed=7, step_ms=1.0)
    records = Records.open(tmp_path / "records.jsonl", {})
    lines, notes = NearLines(server), list[str]()
    measure(plan, lines, bundle, records, notes.append)
    assert lines.shapes == [Shape(0.0, 0.5), Shape(40.0, 0.5)]
    order = [(key[0], key[1], key[2]) for key in records.pictures]
    labels = [row.label for row in rows]
    assert order == [
        (rtt, n, label) for rtt in (0.0, 40.0) for n in (0, 1) for label in labels[n:] + labels[:n]
    ]
    assert {line["seed"] for line in records.pictures.values()} == {7, 8}
    found = {(one.rtt_ms, one.row): one for one in figures(records, rows, (0.0, 40.0), TEMPO)}
    assert all(one.same == 1.0 for one in found.values())  # every row is exact
    near, far = found[0.0, "base"], found[40.0, "base"]
    assert near.passes == 1.0
    assert near.cloud_ms >= 15 * (TEMPO[0] + TEMPO[1])
    assert far.total_ms - near.total_ms >= 100  # handshakes, the opening and one answer: 160, less jitter
    assert far.critical == 2
    # No upper limit: a busy machine may take as long as it likes. The planner's row has its probe as well.
    assert all((one.overrun or 0.0) > -0.01 for one in found.values() if one.row != "auto:wish=exact")
    assert found[0.0, "lossless"].over_without == pytest.approx(
        found[0.0, "scd"].total_ms / found[0.0, "lossless"].total_ms
    )
    drafted = records.of(40.0, "ciar-stream", [0])[0]
    assert drafted["proposals"] > 0
    assert drafted["ledger"]["device_ms"] >= drafted["proposals"] * 1.0
    planned = records.of(40.0, "auto:wish=exact", [0])[0]
    assert planned["why"]
    assert planned["strategy"]
    assert "RTT 40 ms, picture 2 of 2, ms: " in notes[-1]
    # A second time there is nothing left to do, and one more picture is one more round.
    measure(plan, lines, bundle, records, notes.append)
    assert len(lines.shapes) == 2
    assert notes[-1] == "RTT 40 ms: all 2 pictures a row are there"


def test_an_echo_says_how_long_an_answer_takes(server: BackgroundServer) -> None:
    parts = urlsplit(server.url)
    assert parts.port is not None
    with BackgroundRelay(Shape(rtt_ms=30), "127.0.0.1", parts.port) as relay:
        assert 30.0 <= echo_ms(f"ws://127.0.0.1:{relay.port}") <= 80.0
    with pytest.raises(CloudUnavailable, match="does not answer"):
        echo_ms(f"ws://127.0.0.1:{relay.port}")


def test_shaping_that_is_not_there_is_refused_or_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ciar.bench_stream.lines.missing", lambda: "It is missing.")
    with pytest.raises(InputError, match=r"It is missing\. Or use --shaping relay\."):
        lines_of("netem", {})
    instead = lines_of("auto", {})
    assert isinstance(instead, RelayLines)
    assert instead.detail.endswith("Not netem: It is missing.")
    monkeypatch.setattr("ciar.bench_stream.lines.missing", lambda: None)
    assert lines_of("auto", {}).kind == "netem"
    assert lines_of("relay", {}).kind == "relay"


def test_processes_that_fail_say_why() -> None:
    with (
        pytest.raises(InputError, match="no backbone 'nowhere'"),
        Child(
            "ciar.bench_stream.server",
            {"backbone": "nowhere", "device": "cpu", "threads": 1, "tempo": None, "host": "127.0.0.1"},
        ),
    ):
        pass
    with pytest.raises(CiarError, match=r"No module named ciar\.nowhere"), Child("ciar.nowhere", {}):
        pass


def test_the_command_measures_and_reports(
    wide_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = ["bench-stream", "--backbone", str(wide_folder), "--rows", "scd", "--rtt", "20", "--threads", "1"]
    words += ["--pictures", "1", "--pass-ms", "3", "--shaping", "relay", "--out", str(out)]
    assert main(words) == 0
    shown, said = capsys.readouterr()
    assert [line.split("|")[1].strip() for line in shown.splitlines() if line.startswith("| ")] == [
        "setting", "base", "scd",
    ]  # fmt: skip
    assert "shaping: relay." in said
    document = json.loads((out / "bench-stream.json").read_text())
    base, scd = document["figures"]
    assert base["speed_up"] == 1.0
    assert scd["same"] == 1.0
    assert base["total_ms"] >= 60 + 15 * 3
    assert document["settings"]["tempo"] == {"pass_ms": 3.0, "row_ms": 0.0}
    # Again with another tempo into the same folder: refused before anything is started.
    assert main([*words, "--row-ms", "1"]) == 2
    assert "another tempo" in capsys.readouterr().err
    # At another round-trip time: what was measured before stays in the report.
    monkeypatch.setattr("ciar.bench_stream.measure.measure", lambda *_: None)
    monkeypatch.setattr(RelayLines, "__enter__", lambda self: self)
    monkeypatch.setattr(RelayLines, "__exit__", lambda *_: None)
    assert main([*words, "--rtt", "30"]) == 0
    assert json.loads((out / "bench-stream.json").read_text())["figures"] == document["figures"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rtt", "10,x"], "--rtt: give a finite number of at least 0 and at most 10000, not 'x'"),
        (["--rtt", "-1"], "--rtt"),
        (["--rows", "cira"], "There is no strategy 'cira'"),
        (["--loss", "51"], "--loss"),
        (["--megabits", "0"], "--megabits"),
        (["--shaping", "wire"], "--shaping"),
        (["--pass-ms", "nan"], "--pass-ms"),
        (["--backbone", "nowhere"], "There is no backbone 'nowhere'"),
    ],
)
def test_wrong_words(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench-stream", "--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_was_measured_is_reported_after_a_failure(
    wide_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Callable[..., None]) -> None:
        raise KeyboardInterrupt

    class NoLines(nullcontext[None]):
        kind, detail = "relay", "None."

    monkeypatch.setattr("ciar.bench_stream.measure.measure", fail)
    monkeypatch.setattr("ciar.bench_stream.lines.lines_of", lambda *_: NoLines())
    words = ["bench-stream", "--backbone", str(wide_folder), "--rows", "scd", "--shaping", "relay"]
    assert main([*words, "--out", str(tmp_path)]) == 130
    assert (tmp_path / "bench-stream.json").is_file()
    assert "the same command goes on from here" in capsys.readouterr().err
