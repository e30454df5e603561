"""Whether a script counts its steps so that hardly any of them is one at which a snapshot is kept."""

from __future__ import annotations


class SeldomDue:
    """`SeldomDue` counts the steps in a row for which a script has asked for a snapshot, and none was kept."""

    def __init__(self) -> None:
        self._latest: int | None = None
        self._count = 0
        self._is_told = False

    def sentence(self, step: int, every: int, *, is_due: bool) -> str:
        """Return what to tell people, once; "" as long as there is nothing.

        A script that counts by one comes to a step that ``every`` divides after so many; this one has twice as many.
        """
        if is_due or not every:
            self._count = 0
        elif step != self._latest:
            self._count += 1
        self._latest = step
        if self._count <= 2 * every or self._is_told:
            return ""
        self._is_told = True
        return (
            f"run.snapshot(step, every={every}) has kept nothing for {self._count} steps in a row, the latest of which "
            f"is {step}: {every} divides none of them, so all would begin again from an earlier one"
        )
