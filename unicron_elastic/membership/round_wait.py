"""What a node that waits for a round remembers from one look to the next: since when things have been as they are."""

from __future__ import annotations

from unicron_elastic.membership.rounds import Formed, JobView, NotYet, Round, Settings, may_train_unseen, next_round


class RoundWait:
    """One wait for one round. Times are monotonic seconds of this node."""

    def __init__(self, settings: Settings, now: float) -> None:
        self._settings = settings
        self._enough_since: float | None = None
        self._unattended: tuple[Round | None, float] | None = None  # the round of which nobody is left, and since when
        self._last: JobView | None = None
        self.unchanged_since = now

    def decide(self, view: JobView, now: float, blind: str, unseen_for_s: float = 0.0) -> Formed | NotYet:
        """Whether a round can begin, after one more look; ``blind`` is why the view may be old, "": it is not.

        ``unseen_for_s``: for how long at least the store has not seen those of the present round.
        """
        is_enough = len(view.waiting) >= self._settings.min_nodes
        self._enough_since = (self._enough_since or now) if is_enough else None
        # Counted anew after blindness: somebody may have been there meanwhile.
        is_unattended = may_train_unseen(view) and not blind
        if not is_unattended or self._unattended is None or self._unattended[0] != view.round:
            self._unattended = (view.round, now) if is_unattended else None
        if view is not self._last and view != self._last:
            self.unchanged_since, self._last = now, view
        enough_for_s = 0.0 if self._enough_since is None else now - self._enough_since
        unseen_for_s = 0.0 if self._unattended is None else max(unseen_for_s, now - self._unattended[1])
        return next_round(view, self._settings, enough_for_s, unseen_for_s)
