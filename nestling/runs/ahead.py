"""Rounds one after another, some of them started on trust.

Where the engine works asynchronously, the next round is started before the results of one are
looked at. Should a reply turn out not to be finite, or the merge for one that is too large,
everything goes back to how it was before that round, which is played again without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from nestling.runs.accounting import tell
from nestling.runs.admission import Round
from nestling.runs.federation import Federation
from nestling.views import State

Carry = Callable[[Federation, Round], None]
"""Plays a round: sends, trains, admits, merges and tests."""


def rounds_that_stand(
    federation: Federation, carry_out: Carry, halt: Callable[[], bool]
) -> Iterator[Round]:
    """The remaining rounds, each once nothing of it can be taken back. While `halt` says so none is
    started on trust."""
    waiting: deque[Round] = deque()
    number, spoilt = federation.totals.round + 1, dict[int, str]()
    while waiting or number <= federation.rounds:
        # What clients of two rounds had before is not held at once, so where they keep something no
        # round is started on trust.
        most = 0 if halt() or federation.stateful else federation.engine.lookahead
        if (
            number <= federation.rounds
            and len(waiting) <= most
            and not (waiting and waiting[-1].error)
        ):
            waiting.append(
                _started(federation, Round(number, _state(federation), spoilt), carry_out)
            )
            number, spoilt = number + 1, {}
            continue
        done = waiting.popleft()
        federation.ahead = len(waiting)
        broken = done.broken()
        if broken:
            for client in done.outcomes:
                federation.engine.discard(client, done.number)
            federation.roll_back(done.number, done.before)
            waiting.clear()
            number, spoilt = done.number, {**done.spoilt, **broken}
        elif done.error:
            tell(federation, done)
            raise done.error
        else:
            federation.world.store.confirm(done.number)
            yield done


def _state(federation: Federation) -> dict[str, State]:
    return {name: state.copy() for name, state in federation.state().items()}


def _started(federation: Federation, round: Round, carry_out: Carry) -> Round:
    federation.world.store.begin(round.number)
    try:
        carry_out(federation, round)
    except Exception as error:
        # A value that is not finite may be why, in this round or in the one before, and nobody has
        # looked at them yet.
        round.error = error
    return round
