"""Asks the other agents of a job where their workers are, and tells them where ours are, through the job's store.

Nothing is asked while nobody is late. A question is a number in the key under which a fault is told, so that who looks
for faults sees it without asking for more. Each agent answers under a key of its own, in which the latest answer
replaces the one before. What goes over the network is done in the thread that watches the other nodes; the loop only
leaves its wishes here, and reads what came.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable, Collection

from torch.distributed import Store

from unicron_elastic.detection.policy import PacePolicy
from unicron_elastic.detection.remote_ranks import FRESH_S, Heard, NodeReport, parse_report, report_text
from unicron_elastic.detection.sample import RankSample, RemoteRank

NEWS_KEY = "unicron/news"  # in the store of the present round, so a new round begins without it
_QUESTION = "\x01where "  # begins no sentence about a fault
_KEY = "unicron/position"

LOOK_S = 0.02  # between two looks at the store while this agent waits for answers, which take a little longer
LOOK_PER_NODE_S = 0.01  # but no more often than that, for the store of a large job
ROUND_S = 1.0  # after which a question is asked again if somebody does not answer
PAUSE_MIN_S = 0.1  # between two questions: the CPU clocks tick every 10 ms
PAUSE_SHARE = 0.1  # of the time that ranks have been late, between two questions
PAUSE_MAX_S = FRESH_S / 2 - ROUND_S / 2
WISH_S = 1.5  # so long it lasts; a look at a standstill comes once a second


def question_in(news: bytes) -> int | None:
    """The number of the question; None if it is none, but the word of a fault."""
    found = re.fullmatch(f"{_QUESTION}([0-9]{{1,9}})".encode(), news)
    return int(found[1]) if found else None


class RemoteRanks:
    """`RemoteRanks` asks other agents of one round for their ranks, and answers them.

    ``rank`` and ``size`` count agents, ``members`` the workers that train, at present.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        members: int,
        host: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._clock = clock
        self._rank = rank
        self._others = [each for each in range(size) if each != rank]
        self.members = members
        self._host = host
        self._heard = Heard()  # written by the watching thread alone
        self._wished_at = self._wishes_since = -math.inf
        self._looked_at = 0.0
        self._answers: deque[str] = deque(maxlen=1)
        self._there: set[int] = set()  # of the others, who have answered once
        self._is_off = False
        self._was_noted = False
        # Called from the thread that watches the other nodes: a question has come, and what people should hear.
        self.on_question: Callable[[int], None] = lambda _: None
        self.on_note: Callable[[str], None] = lambda _: None
        self.wake: Callable[[], None] = lambda: None

    # -- from the loop ------------------------------------------------------------------------------------------------

    def wish(self) -> None:
        """Wishes to know of the ranks elsewhere; to be said again as long as it is so."""
        now = self._clock()
        was_wished = self._is_wished(now)
        if not was_wished:
            self._wishes_since = now
        self._wished_at = now
        if not was_wished:
            self.wake()

    def answer(self, question: int, ranks: tuple[RankSample, ...]) -> None:
        """Where the workers here are."""
        report = NodeReport(asked=question, node=self._host, at=self._clock(), ranks=ranks)
        self._answers.append(report_text(report))
        self.wake()

    def ranks(self, here: Collection[RankSample], policy: PacePolicy) -> tuple[RemoteRank, ...]:
        """All members but those ``here``, as they were a moment ago; nothing if some are not known."""
        return self._heard.ranks(here, self.members, self._clock(), policy)

    # -- from the thread that watches the other nodes -----------------------------------------------------------------

    def pause_s(self, usual_s: float) -> float:
        """When to look at the store again, which is usually done every ``usual_s`` seconds."""
        now = self._clock()
        if not self._is_wished(now):
            return usual_s
        if self._heard.has_all(self._others):
            return min(usual_s, PAUSE_MIN_S / 2)
        return min(usual_s, max(self._look_s(), PAUSE_SHARE * (now - self._heard.latest_at)))

    def exchange(self, news: bytes | None) -> None:
        """Asks, answers and reads what there is to; ``news`` is what the store has under ``NEWS_KEY``.

        A store that cannot do it is left alone from then on: it is the watch of the other nodes that notices if it is
        gone.
        """
        if self._is_off or (news is not None and question_in(news) is None):
            return  # of a fault, which must not be overwritten, the watch tells
        try:
            self._exchange(news)
        except Exception as error:
            self._is_off = True
            self.on_note(f"The other nodes cannot be asked where their ranks are: {error}")

    def _exchange(self, news: bytes | None) -> None:
        now = self._clock()
        self._hear_question(news, now)
        while self._answers:
            self._store.set(f"{_KEY}/{self._rank}", self._answers.popleft())
        if not self._is_wished(now):
            return
        if self._heard.latest and not self._heard.has_all(self._others) and now - self._looked_at >= self._look_s() / 2:
            self._looked_at = now
            self._read()
        if self._is_question_due(now):
            question = f"{_QUESTION}{self._heard.latest + 1}"
            # Where another agent was faster, or tells of a fault, its word stays.
            stands = self._store.compare_set(NEWS_KEY, (news or b"").decode(errors="replace"), question)
            self._hear_question(bytes(stands), now)

    def _hear_question(self, news: bytes | None, now: float) -> None:
        question = question_in(news) if news is not None else None
        if question is not None and question > self._heard.latest:
            self._heard = self._heard.asked(question, now)
            self.on_question(question)

    def _is_question_due(self, now: float) -> bool:
        passed_s = now - self._heard.latest_at
        if not self._heard.has_all(self._others):
            return passed_s >= ROUND_S + self._look_s()
        pause_s = max(PAUSE_MIN_S, 2 * self._look_s(), PAUSE_SHARE * (now - self._wishes_since))
        return passed_s >= min(pause_s, PAUSE_MAX_S)

    def _read(self) -> None:
        self._see_who_is_there()
        nodes = sorted(self._there)
        if not nodes:
            return
        for node, text in zip(nodes, self._store.multi_get([f"{_KEY}/{each}" for each in nodes]), strict=True):
            try:
                self._heard = self._heard.told(node, parse_report(bytes(text)))
            except ValueError as error:
                if not self._was_noted:
                    self._was_noted = True
                    self.on_note(f"What node {node} tells of its ranks is ignored: {error}")

    def _see_who_is_there(self) -> None:
        """See who is there: getting what is not would wait. A lost node never answers; the others do all the same."""
        missing = [each for each in self._others if each not in self._there]
        if missing and self._store.check([f"{_KEY}/{each}" for each in missing]):
            self._there.update(missing)
        elif missing and self._clock() - self._heard.latest_at > ROUND_S / 2:
            self._there.update(each for each in missing if self._store.check([f"{_KEY}/{each}"]))

    def _is_wished(self, now: float) -> bool:
        return now - self._wished_at <= WISH_S

    def _look_s(self) -> float:
        return max(LOOK_S, LOOK_PER_NODE_S * len(self._others))
