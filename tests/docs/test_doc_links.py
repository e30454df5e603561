"""Every link of the documentation leads somewhere, and every page is in the navigation."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from doc_pages import DOCS, REPOSITORY, Page, anchor, pages, tool

SITE = tool("site")
PRODUCT = ("unicron_elastic", "launcher", "rendezvous")
SOURCES = [
    f"/{path.relative_to(REPOSITORY)}"
    for top in (*PRODUCT, "tests", "benchmarks", "examples", "docs", "contrib")
    for path in (REPOSITORY / top).rglob("*.py")
]
NAVIGATION = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.path)
def test_links_and_anchors_resolve(page: Page) -> None:
    wrong = []
    for target, at in SITE.links(page.text, page.path):
        if not (REPOSITORY / target).exists():
            wrong.append(f"{target} is not there")
        elif at and at[1:] not in Page(target).anchors():
            wrong.append(f"{target} has no {at}")
    own = re.findall(r"\]\(#([^)\s]+)\)", page.text)
    assert wrong + [f"there is no #{at}" for at in own if at not in page.anchors()] == []


@pytest.mark.parametrize(
    "page", [page for page in pages() if "conformance" not in page.path], ids=lambda page: page.path
)
def test_files_that_are_named_exist(page: Page) -> None:
    """But on the pages that name PyTorch's files."""
    named = set(
        re.findall(r"`((?:launcher|rendezvous|unicron_elastic|tests|benchmarks|examples|docs)/[\w./-]+)`", page.text)
    )
    assert [path for path in sorted(named) if not (REPOSITORY / path).exists()] == []


@pytest.mark.parametrize(
    "page", [page for page in pages() if "conformance" not in page.path], ids=lambda page: page.path
)
def test_files_that_are_named_by_the_end_of_their_path_exist(page: Page) -> None:
    named = set(re.findall(r"`([\w.-]+/[\w./-]+\.py)`", page.text))
    assert [path for path in sorted(named) if not any(each.endswith(f"/{path}") for each in SOURCES)] == []


def test_the_page_of_rooms_names_every_room() -> None:
    (tree, *_) = [text for _, text, _ in Page("docs/rooms.md").blocks()]
    rooms = {path.parent.name for top in PRODUCT for path in (REPOSITORY / top).rglob("__init__.py")}
    assert sorted(rooms - set(re.findall(r"\w+", tree))) == []


def test_files_that_the_page_of_rooms_names_are_in_the_room_of_their_row() -> None:
    rows = re.findall(r"^\| (`[^|]+) \| (`[^|]+) \|", Page("docs/rooms.md").text, re.MULTILINE)
    assert rows
    for rooms, files in rows:
        for room, names in zip(re.findall(r"`(.+?)`", rooms), files.split(";"), strict=True):
            top = room if room.startswith("launcher") else f"unicron_elastic/{room}"
            missing = [name for name in re.findall(r"`(\w+)`", names) if not (REPOSITORY / top / f"{name}.py").exists()]
            assert missing == [], room


def test_the_first_page_is_short() -> None:
    assert len(Page("README.md").text.splitlines()) <= 120


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.path)
def test_lists_and_tables_stand_apart(page: Page) -> None:
    """The site's Markdown takes them for the paragraph before them otherwise."""
    prose = re.sub(r"^```.*?^```", "", page.text, flags=re.MULTILINE | re.DOTALL)
    begins = re.findall(r"^(?![ |\-*#\d]).+\n(?:- |\d+\. |\| ).*", prose, re.MULTILINE)
    assert begins == []


def test_the_navigation_has_every_page() -> None:
    there = [SITE.site_path(f"docs/{path.name}") for path in DOCS.glob("*.md")]
    there += [SITE.site_path(path) for path in SITE.PAGES_OUTSIDE]
    leaves = _leaves(NAVIGATION["nav"])
    assert sorted(set(there) ^ set(leaves)) == []
    assert len(leaves) == len(set(leaves))


def test_the_site_has_what_pages_link_to() -> None:
    needed = set(SITE.outside())
    assert {"examples/README.md", "tests/conformance/README.md", "contrib/grafana/unicron.json"} <= needed
    for path in needed:
        assert (REPOSITORY / path).exists()


@pytest.mark.parametrize(
    ("text", "path", "made"),
    [
        ("[a](jobs.md#rules)", "docs/cluster.md", "[a](jobs.md#rules)"),
        ("[a](../examples/README.md)", "docs/cluster.md", "[a](repository/examples/README.md)"),
        ("[a](docs/jobs.md)", "CHANGELOG.md", "[a](../jobs.md)"),
        ("[a](../docs/jobs.md#x) `[b](c)`", "examples/README.md", "[a](../../jobs.md#x) `[b](c)`"),
        ("![a](figures/a.png) [b](https://b.org/c.md)", "docs/a.md", "![a](figures/a.png) [b](https://b.org/c.md)"),
    ],
)
def test_links_are_rewritten_for_the_site(text: str, path: str, made: str) -> None:
    assert SITE.rewritten(text, path) == made


def test_the_site_needs_nothing_from_the_internet() -> None:
    assert NAVIGATION["theme"]["font"] is False
    assert not {"extra_javascript", "extra_css"} & set(NAVIGATION)
    texts = "".join(page.text for page in pages())
    assert re.findall(r"!\[[^]]*\]\(https?:", texts) == []
    assert "```mermaid" not in texts  # the theme would fetch a script for it


def test_the_picture_is_whole_and_names_no_other_file() -> None:
    text = (DOCS / "architecture.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert not re.search(r"href|@import|url\((?!#)", text)


@pytest.mark.parametrize(
    ("heading", "made"),
    [
        ("Tier 1: state from memory", "tier-1-state-from-memory"),
        ("At 3 a.m.", "at-3-am"),
        ("`--x` and [y](z)", "x-and-y"),
    ],
)
def test_anchors_are_those_of_the_site(heading: str, made: str) -> None:
    assert anchor(heading).strip("-") == made


def _leaves(tree: Any) -> list[str]:
    if isinstance(tree, str):
        return [tree]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in _leaves(part)]
