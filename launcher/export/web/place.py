"""Where web pages are served, as the store has it and as people are told. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from unicron_elastic.launcher.export.listen_address import ListenAddress


@dataclass(frozen=True, slots=True)
class CoordinatorPlace:
    """Whether this process coordinates; else who does, "" for nobody, and where that one's page is, if it has one."""

    leads: bool
    host: str = ""
    place: ListenAddress | None = None

    @property
    def sentence(self) -> str:
        """Say who coordinates, and where to look."""
        if not self.host:
            return "Nobody coordinates the cluster at the moment."
        if self.place is None:
            return f"{self.host} coordinates the cluster, and serves no page: it was started without --web-port."
        if self.place.is_local:
            return f"{self.host} coordinates the cluster; its page can be reached from that host alone, {self.tunnel}."
        return f"{self.host} coordinates the cluster; its page is at {self.place.url}"

    @property
    def url(self) -> str:
        """The page of who coordinates, for a browser on any host; "" if there is none."""
        return "" if self.place is None or self.place.is_local else self.place.url

    @property
    def tunnel(self) -> str:
        """How a page that only its own host reaches is reached from elsewhere."""
        if self.place is None:
            return ""
        port = self.place.port
        return f"or by: ssh -L {port}:{self.place.text} {self.host}, and http://localhost:{port}/"
