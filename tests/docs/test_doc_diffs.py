"""The diffs that pages show are those of the files that they name, all of them."""

from __future__ import annotations

import difflib
import re

import pytest
from doc_pages import REPOSITORY, Page, pages

TITLED = re.compile(r'^```diff title="(\S+) (\S+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
MOST_LINES = {"restored": (10, 4), "in_place": (32, 30)}  # added, taken away


def difference(before: str, after: str) -> str:
    """Lines that go and lines that come; an empty line where others stand between them."""
    texts = [(REPOSITORY / name).read_text(encoding="utf-8").splitlines() for name in (before, after)]
    lines = [line for line in difflib.unified_diff(*texts, lineterm="", n=0) if line[:3] not in ("---", "+++")]
    return "\n".join("" if line.startswith("@@") else line for line in lines).lstrip("\n") + "\n"


@pytest.mark.parametrize("page", [page for page in pages() if TITLED.search(page.text)], ids=lambda page: page.path)
def test_diffs_are_those_of_the_files(page: Page, request: pytest.FixtureRequest) -> None:
    """With ``--update`` they are written anew."""
    right = TITLED.sub(
        lambda found: f'```diff title="{found[1]} {found[2]}"\n{difference(found[1], found[2])}```', page.text
    )
    if request.config.getoption("--update"):
        (REPOSITORY / page.path).write_text(right, encoding="utf-8")
    assert page.text == right


@pytest.mark.parametrize("kind", ["gpt", "resnet"])
@pytest.mark.parametrize("tier", MOST_LINES)
def test_a_tier_takes_few_lines(kind: str, tier: str) -> None:
    lines = difference(f"examples/train_{kind}.py", f"examples/train_{kind}_{tier}.py").splitlines()
    counts = [sum(line.startswith(sign) for line in lines) for sign in "+-"]
    assert all(count <= most for count, most in zip(counts, MOST_LINES[tier], strict=True)), counts
    assert f'title="examples/train_{kind}.py examples/train_{kind}_{tier}.py"' in Page("docs/from-torchrun.md").text
