"""Asks a launcher for its metrics, as a monitor does."""

from __future__ import annotations

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def asked(port: int, path: str) -> tuple[int, str]:
    """Status and body; 0 while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def scraped(port: int, *, without: str = "") -> dict[tuple[str, ...], float]:
    """Values by name and label values, those in the order of the labels' names, ``without`` the label of that name."""
    _, text = asked(port, "/metrics")
    return {
        (sample.name, *(value for label, value in sorted(sample.labels.items()) if label != without)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
