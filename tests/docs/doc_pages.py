"""What the tests of the documentation share: its pages, their fenced blocks, and the tools beside them."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Page:
    """A Markdown file; ``path`` is relative to the top of the repository."""

    path: str

    @property
    def text(self) -> str:
        return (REPOSITORY / self.path).read_text(encoding="utf-8")

    def blocks(self) -> Iterator[tuple[str, str, str]]:
        """Fenced ones: language, text, and where it is."""
        text = self.text
        for found in _FENCE.finditer(text):
            yield found[1], found[2], f"{self.path}:{text.count(chr(10), 0, found.start()) + 2}"

    def anchors(self) -> set[str]:
        """Of its headings, as GitHub and the site make them."""
        prose = _FENCE.sub("", self.text)
        headings = re.findall(r"^#{1,6} (.+?)\s*$", prose, re.MULTILINE)
        return {anchor(heading) for heading in headings}


def anchor(heading: str) -> str:
    """Lower case, no punctuation, a dash for each run of blanks."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", text.lower()).strip())


def pages() -> list[Page]:
    """The documentation, and what else stands in the repository for people to read."""
    docs = [f"docs/{path.name}" for path in sorted(DOCS.glob("*.md"))]
    others = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "tests/conformance/README.md"]
    return [Page(path) for path in [*docs, *others]]


def tool(name: str) -> ModuleType:
    """A module of docs/tools."""
    spec = importlib.util.spec_from_file_location(f"docs_tools_{name}", DOCS / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
