"""Where all nodes have a rank from the start: torch's own rendezvous, but for the silence in which it waits."""

from __future__ import annotations

from unicron_elastic.compat import rendezvous as torchs
from unicron_elastic.compat.rendezvous import RendezvousHandler, RendezvousInfo
from unicron_elastic.membership.wait_news import SILENT_S, who_waits
from unicron_elastic.rendezvous.job.job_rendezvous import PlainRendezvous
from unicron_elastic.rendezvous.torch.telling_who_waits import telling_who_waits


class StaticRendezvous(PlainRendezvous):
    """`StaticRendezvous` is torch's static ``handler``, and says for whom it waits."""

    def __init__(self, handler: RendezvousHandler) -> None:
        super().__init__(handler)
        self.silent_s = SILENT_S

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes. Raises what torch's raises."""
        place = torchs.static_place(self._handler)
        with telling_who_waits(lambda: "" if place is None else who_waits(*place), self.silent_s):
            return self._handler.next_rendezvous()
