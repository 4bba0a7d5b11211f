"""What a request's own record says of where it has been."""

from __future__ import annotations

from router.explanation import Moved, Placement
from router.journal import Journal, Prompt
from router.placement.candidate import Forecast
from workers.engine.request import ChoiceParams

STAY = Forecast(0.0, 0.0, 0.0)


def test_what_a_request_waited_in_queues_that_it_left_ends_with_its_first_token() -> None:
    journal = Journal("r", Prompt([1, 2, 3]), ChoiceParams(max_tokens=8))
    moved = Moved("room", STAY)
    # Placed, moved after 2 s; its replica is lost at 10 s, and it changes queues once more, 5 s later.
    for at_s, why in ((100.0, None), (102.0, moved), (110.0, None), (115.0, moved)):
        journal.placements.append(Placement(at_s, [], 1, moved=why))

    assert journal.waited_before_moving_s(first_s=103.0) == 2.0
    assert journal.waited_before_moving_s(first_s=None) == 7.0
    assert journal.num_migrations == 1
