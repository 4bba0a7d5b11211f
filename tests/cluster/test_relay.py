"""Questions find whoever can answer, and none is open for ever."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from cluster import relay as relays
from cluster.proto import shoal_pb2 as pb
from cluster.relay import Relay


@dataclass
class Ingress:
    number: int
    questions: list[pb.Question] = field(default_factory=list)
    answers: list[pb.Answer] = field(default_factory=list)

    def put(self, message: pb.ReplicaMessage) -> None:
        kind = message.WhichOneof("kind")
        (self.questions if kind == "question" else self.answers).append(getattr(message, str(kind)))


def asked(num_others: int = 2) -> tuple[Relay, Ingress, list[Ingress]]:
    relay, asker, others = Relay(), Ingress(0), [Ingress(1 + number) for number in range(num_others)]
    relay.ask(asker, pb.Question(id=7, request_id="r", tenant="t"), others)
    return relay, asker, others


def reply(relay: Relay, ingress: Ingress, body: bytes) -> None:
    relay.take(ingress.number, pb.Answer(id=ingress.questions[0].id, body=body))


def test_the_first_answer_that_says_something_goes_back() -> None:
    relay, asker, others = asked()

    reply(relay, others[0], b"")
    assert asker.answers == []
    reply(relay, others[1], b"{}")

    assert [(one.id, one.body) for one in asker.answers] == [(7, b"{}")]
    assert (others[0].questions[0].request_id, others[0].questions[0].tenant) == ("r", "t")
    assert relay.num_open == 0


def test_nobody_knows_once_all_have_said_so_or_left() -> None:
    relay, asker, others = asked()

    reply(relay, others[0], b"")
    relay.leave(others[1].number)

    assert [one.body for one in asker.answers] == [b""]


def test_an_ingress_alone_is_answered_at_once() -> None:
    _, asker, _ = asked(num_others=0)

    assert [one.body for one in asker.answers] == [b""]


def test_an_asker_that_leaves_leaves_nothing_behind() -> None:
    relay, asker, others = asked()

    relay.leave(asker.number)
    reply(relay, others[0], b"{}")

    assert relay.num_open == 0
    assert asker.answers == []


def test_only_those_who_were_asked_may_answer_and_once() -> None:
    relay, asker, others = asked()

    relay.take(99, pb.Answer(id=others[0].questions[0].id, body=b"forged"))
    reply(relay, others[0], b"")
    reply(relay, others[0], b"{}")

    assert asker.answers == []


def test_too_many_open_questions_close_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "MAX_QUESTIONS", 2)
    relay, asker, other = Relay(), Ingress(0), Ingress(1)

    for number in range(3):
        relay.ask(asker, pb.Question(id=number), [other])

    assert [(one.id, one.body) for one in asker.answers] == [(0, b"")]
    assert relay.num_open == 2
