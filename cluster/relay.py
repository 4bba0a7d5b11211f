"""Questions of one ingress to all others, by way of a replica, to which all of them are attached.

Ingresses know replicas and not each other. A question goes to every other ingress of the replica; the first answer
that says something goes back, or an empty one once nobody has said anything. What is asked is the ingresses' affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.proto import shoal_pb2 as pb

MAX_QUESTIONS = 1024
"""Open at once; beyond, the oldest is answered with nothing: an ingress that never answers holds no memory."""


class Asker(Protocol):
    """An ingress's stream."""

    number: int

    def put(self, message: pb.ReplicaMessage) -> None:
        """Send it something."""


@dataclass(slots=True)
class _Question:
    asker: Asker
    asked_id: int
    """The asker's own number for it."""
    left: set[int]
    """Ingresses that have not answered."""


class Relay:
    """The questions that are open at one replica."""

    def __init__(self) -> None:
        self._questions: dict[int, _Question] = {}
        self._num_asked = 0

    @property
    def num_open(self) -> int:
        """Questions without an answer."""
        return len(self._questions)

    def ask(self, asker: Asker, question: pb.Question, others: Sequence[Asker]) -> None:
        """Pass a question on to ``others``."""
        self._num_asked += 1
        number = self._num_asked
        self._questions[number] = _Question(asker, question.id, {one.number for one in others})
        message = pb.ReplicaMessage(
            question=pb.Question(id=number, request_id=question.request_id, tenant=question.tenant)
        )
        for one in others:
            one.put(message)
        if not others:
            self._answer(number, b"")
        elif len(self._questions) > MAX_QUESTIONS:
            self._answer(next(iter(self._questions)), b"")

    def take(self, number: int, answer: pb.Answer) -> None:
        """Ingress ``number`` answers."""
        question = self._questions.get(answer.id)
        if question is None or number not in question.left:
            return
        question.left.discard(number)
        if answer.body or not question.left:
            self._answer(answer.id, answer.body)

    def leave(self, number: int) -> None:
        """Ingress ``number`` is gone: it neither answers nor asks any more."""
        for question_id, question in list(self._questions.items()):
            if question.asker.number == number:
                del self._questions[question_id]
            elif number in question.left:
                question.left.discard(number)
                if not question.left:
                    self._answer(question_id, b"")

    def _answer(self, question_id: int, body: bytes) -> None:
        question = self._questions.pop(question_id)
        question.asker.put(pb.ReplicaMessage(answer=pb.Answer(id=question.asked_id, body=body)))
