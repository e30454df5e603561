"""A hook of MkDocs: what pages link to outside docs/ is put into the site, below ``repository/``.

So the pages are right as files of the repository, and the site is whole without it. Markdown is shown as a page, with
its own links followed, and everything else is a file to download.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

__all__ = ["links", "on_files", "on_page_markdown", "site_path"]

REPOSITORY = Path(__file__).parents[2]
OUTSIDE = "repository/"
PAGES_OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")  # that the navigation has
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def site_path(path: str) -> str:
    """Where a file of the repository is in the site, both relative to their top; of a folder, the list of its files."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{OUTSIDE}{path}/index.md" if (REPOSITORY / path).is_dir() else f"{OUTSIDE}{path}"


def links(text: str, path: str) -> list[tuple[str, str]]:
    """The links of a page to files: (relative to the top of the repository, anchor with its #)."""
    folder = posixpath.dirname(path)
    found = _LINK.finditer(_CODE.sub("", text))
    return [(posixpath.normpath(posixpath.join(folder, each[1])), each[2] or "") for each in found]


def rewritten(text: str, path: str) -> str:
    """The page with links as they are right in the site."""
    folder, here = posixpath.dirname(path), posixpath.dirname(site_path(path))

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[1]))
        return posixpath.relpath(site_path(target), here or ".") + (found[2] or "")

    at, parts = 0, []
    for code in _CODE.finditer(text):
        parts += [_LINK.sub(link, text[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, _LINK.sub(link, text[at:])])


def listed(folder: str) -> list[str]:
    """The files of a folder that can be shown, those below it as well."""
    found = sorted(path for path in (REPOSITORY / folder).rglob("*") if path.is_file())
    return [str(path.relative_to(REPOSITORY)) for path in found if "__pycache__" not in path.parts]


def list_page(folder: str) -> str:
    """A page with links to the files of a folder, as they are in the site."""
    names = [posixpath.relpath(path, folder) for path in listed(folder)]
    return "\n".join([f"# {folder}", "", *(f"- [{name}]({name})" for name in names), ""])


def outside() -> list[str]:
    """Every file and folder outside docs/ that the site needs."""
    left = [f"docs/{path.name}" for path in sorted((REPOSITORY / "docs").glob("*.md"))]
    left += PAGES_OUTSIDE
    needed: dict[str, None] = dict.fromkeys(PAGES_OUTSIDE)
    while left:
        path = left.pop(0)
        found = [target for target, _ in links((REPOSITORY / path).read_text(encoding="utf-8"), path)]
        found += [each for target in found if (REPOSITORY / target).is_dir() for each in listed(target)]
        for target in found:
            if not target.startswith("docs/") and target not in needed and (REPOSITORY / target).exists():
                needed[target] = None
                left += [target] if target.endswith(".md") else []
    return list(needed)


def on_files(files: Any, config: Any) -> Any:
    """Adds them to the files of the site."""
    from mkdocs.structure.files import File, InclusionLevel

    for path in outside():
        source = REPOSITORY / path
        if source.is_dir():
            level = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, site_path(path), content=list_page(path), inclusion=level))
        elif path.endswith(".md"):
            text = rewritten(source.read_text(encoding="utf-8"), path)
            level = InclusionLevel.INCLUDED if path in PAGES_OUTSIDE else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, site_path(path), content=text, inclusion=level))
        else:
            files.append(File.generated(config, site_path(path), abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_rest: Any) -> str:
    """Rewrites the links of a page of docs/; those of others are right already."""
    uri = page.file.src_uri
    return markdown if uri.startswith(OUTSIDE) else rewritten(markdown, f"docs/{uri}")
