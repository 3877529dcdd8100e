"""The in-process transport, and what every connection does whatever carries its frames."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from transport.fake_cloud import TOKENS, VOCAB_SIZE, FakeCloud, opening, picture, run_picture

from ciar.errors import (
    CheckpointError,
    CiarError,
    CloudUnavailable,
    InputError,
    NumericalError,
    ProtocolError,
    RemoteError,
    ServerBusy,
)
from ciar.protocol import Cancel, Cost, Done, Draft, Error, Message, Opened, Patch, encode
from ciar.transport.base import FrameConnection, ReceiveTimeout
from ciar.transport.conversation import Conversation
from ciar.transport.failures import INTERNAL_MESSAGE, VersionMismatch, error_message, exception_for
from ciar.transport.inprocess import InProcessTransport


def test_a_picture_and_its_bytes() -> None:
    cloud = FakeCloud()
    tokens, connection = run_picture(InProcessTransport(cloud), seed=5)
    assert tokens == picture(5)
    ups = [encode(opening(5))] + [
        encode(
            Draft(s, 4 * s, tuple((t + k % 2) for k, t in enumerate(tokens[4 * s : 4 * s + 4])), (False,) * 4)
        )
        for s in range(4)
    ]
    assert connection.bytes_up == sum(map(len, ups))
    assert connection.bytes_down > len(encode(Done(tokens)))
    assert not cloud.live


@pytest.mark.parametrize(
    ("raised", "code", "back"),
    [
        (InputError("No."), "input", InputError),
        (ProtocolError("No."), "protocol", ProtocolError),
        (ServerBusy("No.", 3.5), "busy", ServerBusy),
        (NumericalError("No."), "numerical", NumericalError),
        (VersionMismatch("No."), "version", ProtocolError),
        (CheckpointError("/secret/path"), "internal", RemoteError),
        (RuntimeError("/secret/path"), "internal", RemoteError),
        (CloudUnavailable("/secret/path"), "internal", RemoteError),
    ],
)
def test_exceptions_travel_as_errors_and_come_back(
    raised: Exception, code: str, back: type[CiarError]
) -> None:
    message = error_message(raised)
    assert message.code == code
    assert message.message == (INTERNAL_MESSAGE if code == "internal" else "No.")
    returned = exception_for(message)
    assert isinstance(returned, back)
    assert str(returned) == message.message
    if isinstance(returned, ServerBusy):
        assert returned.retry_after_s == 3.5


def test_any_sentence_of_an_exception_fits_an_error() -> None:
    for sentence in ("x" * 100_000, "half \ud83d", ""):
        assert encode(error_message(InputError(sentence)))


@pytest.mark.parametrize(
    "failure",
    [NumericalError("NaN at position 3."), InputError("No."), ProtocolError("No."), ServerBusy("No.")],
)
def test_failures_of_the_cloud_arrive_as_exceptions_and_end_the_session(failure: CiarError) -> None:
    cloud = FakeCloud()
    cloud.failure = failure
    with InProcessTransport(cloud).connect() as connection:
        connection.send(opening())
        connection.receive()
        connection.send(Draft(0, 0, want=2))
        with pytest.raises(type(failure), match=str(failure)):
            connection.receive()
        assert not cloud.live
        with pytest.raises(CloudUnavailable, match="over"):
            connection.send(Draft(1, 2, want=2))


def test_an_error_that_waits_is_raised_by_the_next_send() -> None:
    cloud = FakeCloud()
    cloud.failure = NumericalError("NaN at position 3.")
    with InProcessTransport(cloud).connect() as connection:
        connection.send(opening())
        connection.send(Draft(0, 0, want=2))
        with pytest.raises(NumericalError, match="position 3"):
            connection.send(Draft(1, 2, want=2))


def test_bad_openings_are_refused_before_the_cloud_is_asked() -> None:
    cloud = FakeCloud()
    for message, match in (
        (dataclasses.replace(opening(), backbone="anole"), "backbone fake"),
        (dataclasses.replace(opening(), weights="w2"), "same version"),
    ):
        with InProcessTransport(cloud).connect() as connection:
            connection.send(message)
            with pytest.raises(VersionMismatch, match=match):
                connection.receive()
    assert cloud.opens == 0
    with InProcessTransport(cloud).connect() as connection:
        connection.send(opening(prompt=" "))
        with pytest.raises(InputError, match="empty"):
            connection.receive()
        with pytest.raises(InputError, match="characters"):
            connection.send(opening(prompt="x" * 3000))


@pytest.mark.parametrize(
    "message",
    [
        Draft(0, 0, (VOCAB_SIZE,), (True,)),  # an id beyond the vocabulary
        Draft(0, TOKENS - 1, (1, 2), (True, True)),  # beyond the picture
        Draft(0, 0, want=TOKENS + 1),
        Draft(3, 0, want=1),  # out of order
        Patch(0, 0, (1,), (0,), 1),  # what only a cloud may send
        Error("busy", "No."),
        opening(),  # open twice
    ],
)
def test_messages_that_do_not_fit_the_session_end_it(message: Message) -> None:
    cloud = FakeCloud()
    with InProcessTransport(cloud).connect() as connection:
        connection.send(opening())
        connection.receive()
        connection.send(message)
        with pytest.raises(ProtocolError):
            connection.receive()
    assert not cloud.live
    assert cloud.passes == 0


def test_a_draft_before_open_is_refused() -> None:
    with InProcessTransport(FakeCloud()).connect() as connection:
        connection.send(Draft(0, 0, want=1))
        with pytest.raises(ProtocolError, match="Open first"):
            connection.receive()


def test_a_repeated_step_is_answered_the_same_way_without_a_pass() -> None:
    cloud = FakeCloud()
    with InProcessTransport(cloud).connect() as connection:
        connection.send(opening())
        connection.receive()
        answers = []
        for _ in range(3):
            connection.send(Draft(0, 0, want=3))
            answers.append(connection.receive())
        assert answers[0] == answers[1] == answers[2]
        assert cloud.passes == 1


def test_cancel_and_close_free_the_session() -> None:
    cloud = FakeCloud()
    connection = InProcessTransport(cloud).connect()
    connection.send(opening())
    connection.receive()
    assert len(cloud.live) == 1
    connection.send(Cancel())
    assert not cloud.live
    connection.close()
    connection.close()
    with pytest.raises(CloudUnavailable):
        connection.receive(1.0)


def test_receive_says_so_when_nothing_can_come() -> None:
    with InProcessTransport(FakeCloud()).connect() as connection:
        for timeout_s in (None, 0, 0.02):
            with pytest.raises(ReceiveTimeout):
                connection.receive(timeout_s)
        connection.send(opening())  # it is still usable
        assert isinstance(connection.receive(0), Opened)


def test_receive_waits_for_a_send_of_another_thread() -> None:
    cloud = FakeCloud(delay_s=0.15)
    with InProcessTransport(cloud).connect() as connection:
        connection.send(opening())
        connection.receive()
        sender = threading.Thread(target=connection.send, args=(Draft(0, 0, want=1),))
        sender.start()
        assert cloud.begun.acquire(timeout=5)
        assert isinstance(connection.receive(), Patch)
        sender.join()


def test_closing_while_a_session_opens_frees_it() -> None:
    cloud = FakeCloud()
    cloud.open_delay_s = 0.2
    conversation = Conversation(cloud)
    answers: list[Message] = []
    thread = threading.Thread(target=lambda: answers.extend(conversation.answer(opening())))
    thread.start()
    conversation.close()
    thread.join()
    assert cloud.opens == 1
    assert not cloud.live
    assert not any(isinstance(answer, Opened) for answer in answers)


def test_closing_during_a_draft_drops_its_answers() -> None:
    cloud = FakeCloud()
    cloud.gate = threading.Event()
    conversation = Conversation(cloud)
    assert [type(answer) for answer in conversation.answer(opening())] == [Opened]
    answers: list[Message] = []
    thread = threading.Thread(target=lambda: answers.extend(conversation.answer(Draft(0, 0, want=1))))
    thread.start()
    assert cloud.begun.acquire(timeout=5)
    conversation.close()
    cloud.gate.set()
    thread.join()
    assert answers == []
    assert not cloud.live


class Scripted(FrameConnection):
    """A cloud that says what a test tells it to."""

    def __init__(self, *messages: Message) -> None:
        super().__init__()
        self._frames = [encode(message) for message in messages]

    def send_frame(self, frame: bytes) -> None:
        pass

    def receive_frame(self, timeout_s: float | None = None) -> bytes:
        return self._frames.pop(0)

    def close(self) -> None:
        pass


OPENED = Opened("s", 16, 100, max_frame_bytes=200)


@pytest.mark.parametrize(
    ("script", "match"),
    [
        ([Patch(0, 0, (1,), (0,), 1)], "before it opened"),
        ([OPENED, OPENED], "twice"),
        ([OPENED, Draft(0, 0, want=1)], "only a device"),
        ([OPENED, Patch(0, 0, (100,), (0,), 1)], "not below 100"),
        ([OPENED, Patch(0, 16, (1,), (0,), 1)], "beyond the 16"),
        ([OPENED, Patch(0, 0, (1,), (0,), 17)], "beyond the 16"),
        ([OPENED, Patch(1, 0, (1,), (0,), 1)], "not sent"),
        ([OPENED, Done((1,) * 15)], "15 of 16"),
    ],
)
def test_a_cloud_that_breaks_the_protocol_is_caught(script: list[Message], match: str) -> None:
    connection = Scripted(*script)
    connection.send(Draft(0, 0, want=1))
    for _ in script[:-1]:
        connection.receive()
    with pytest.raises(ProtocolError, match=match):
        connection.receive()


def test_the_announced_frame_limit_is_kept() -> None:
    connection = Scripted(OPENED)
    connection.receive()
    with pytest.raises(ProtocolError, match="limit of 200"):
        connection.send(Draft(0, 0, (1,) * 200, (True,) * 200))


def test_an_invalid_answer_is_the_clouds_own_failure() -> None:
    cloud = FakeCloud()
    conversation = Conversation(cloud)
    session = cloud.open(opening())
    session.opened = dataclasses.replace(session.opened, vocab_size=-1)
    cloud.open = lambda message: session  # type: ignore[method-assign]
    assert list(conversation.answer(opening())) == [Error("internal", INTERNAL_MESSAGE)]
    assert isinstance(conversation.failure, RuntimeError)
    assert session.is_closed


def test_costs_survive() -> None:
    with InProcessTransport(FakeCloud()).connect() as connection:
        connection.send(opening())
        connection.receive()
        connection.send(Draft(0, 0, want=3))
        patch = connection.receive()
        assert isinstance(patch, Patch)
        assert patch.cost == Cost(1, 3, 0.5)
