"""Settings from a YAML file: what stands where, checked against the table before anything of it is used.

Scalars are taken as they are written, so that a value means in the file what it means on the command line: ``2:4`` is
no number in base 60, and ``on`` no other word than ``on``. Nothing in a file makes an object of Python.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from unicron_elastic.launcher.config.origin import BadConfig
from unicron_elastic.launcher.config.settings import SHARED, Setting

MAX_BYTES = 1 << 20
MOST_LEVELS = 10
_PLAIN = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class FileSetting:
    """A setting that a file has. ``text`` is as on a command line; several values have commas between."""

    setting: Setting
    text: str
    place: str  # FILE:LINE


Entries = dict[tuple[str, str], FileSetting]  # by section and key


def read_config(path: str, table: Mapping[str, Mapping[str, Setting]]) -> Entries:
    """The settings of a file. Raises BadConfig for what the table does not have, or not like this."""
    raw, mode = _content(path)
    try:
        root = yaml.compose(raw, Loader=_ShallowLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise BadConfig(f"{path}{line}: this is no YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        words = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise BadConfig(f"{path}: this is no YAML: {words}") from None
    found: Entries = {}
    for section, node, place in _members(root, path, "the file", "sections, such as run:", "-"):
        known = table.get(section)
        if known is None:
            raise BadConfig(f"{place}: there is no section {section!r}{_nearest(section, table)}")
        what = f"the section {section}"
        for key, value, where in _members(node, path, what, f"settings, such as {next(iter(known))}: VALUE", "_"):
            setting = known.get(key)
            if setting is None:
                raise BadConfig(f"{where}: {section} has no setting {key!r}{_elsewhere(key, section, table)}")
            found[section, key] = _entry(setting, value, where)
    _check_mode(path, mode, found)
    return found


class _ShallowLoader(yaml.SafeLoader):
    """Of what is nested more deeply than settings are, nothing is read: the time for that grows with its square."""

    levels = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Raises RecursionError."""
        if self.levels == MOST_LEVELS:
            raise RecursionError
        self.levels += 1
        found = super().compose_node(parent, index)
        self.levels -= 1
        return found


def _content(path: str) -> tuple[bytes, int]:
    """What is in the file, and who may read and write it."""
    try:
        fd = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):  # a pipe could block for ever
                raise BadConfig(f"{path} is no regular file; give a YAML file")
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadConfig(f"{path} cannot be read: {error.strerror or error}") from None
    if len(raw) > MAX_BYTES:
        raise BadConfig(f"{path} is longer than {MAX_BYTES >> 20} MiB; that is no file of settings")
    return raw, mode


def _check_mode(path: str, mode: int, found: Entries) -> None:
    if mode & stat.S_IWOTH:
        raise BadConfig(f"{path} may be changed by everybody, and it says what commands run; chmod o-w {path}")
    for entry in found.values():
        if entry.setting.is_secret and mode & (stat.S_IRWXG | stat.S_IRWXO):
            instead = f"{SHARED}.etcd_password_file"
            name = entry.setting.name
            raise BadConfig(
                f"{entry.place}: {name} is a secret, and others may read this file; chmod 600 {path}, or set {instead}"
            )


def _members(node: Any, path: str, what: str, wanted: str, joint: str) -> Iterator[tuple[str, Any, str]]:
    """Yield a mapping's members: key with ``joint`` between its words, value, FILE:LINE. Raises BadConfig."""
    if node is None or _is_null(node):
        return
    if not isinstance(node, yaml.MappingNode):
        raise BadConfig(f"{path}:{node.start_mark.line + 1}: {what} must have {wanted}")
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        place = f"{path}:{line}"
        if not isinstance(key, yaml.ScalarNode):
            raise BadConfig(f"{place}: {what} must have {wanted}")
        name = re.sub("[-_]", joint, key.value)
        if name in seen:
            raise BadConfig(f"{place}: {key.value!r} is there twice, first in line {seen[name]}")
        seen[name] = line
        yield name, value, place


def _is_null(node: Any) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == f"{_PLAIN}null"


def _entry(setting: Setting, node: Any, place: str) -> FileSetting:
    name = f"{place}: {setting.name}"
    if _is_null(node):
        raise BadConfig(f"{name} has no value; give one, or take the line out")
    if isinstance(node, yaml.SequenceNode) and setting.is_many:
        words = ",".join(_scalar(each, setting, name) for each in node.value)
    else:
        words = _scalar(node, setting, name)
    try:
        setting.value(words, name)
    except ValueError as error:
        raise BadConfig(str(error)) from None
    return FileSetting(setting, words, place)


def _scalar(node: Any, setting: Setting, name: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        what = "a list" if isinstance(node, yaml.SequenceNode) else "a section of its own"
        how = ", with commas between several" if isinstance(node, yaml.SequenceNode) else ""
        raise BadConfig(f"{name} takes {_with_article(setting.kind.name)} as on the command line{how}, and not {what}")
    if not node.tag.startswith(_PLAIN) or node.tag.startswith(f"{_PLAIN}python/"):
        raise BadConfig(f"{name} has the tag {node.tag}; tags are not for settings")
    if "\0" in node.value:
        raise BadConfig(f"{name} must not hold a zero character")
    return str(node.value)


def _with_article(kind: str) -> str:
    return kind if kind.startswith(("on ", "one ", "text")) else f"a {kind}"


def _elsewhere(key: str, section: str, table: Mapping[str, Mapping[str, Setting]]) -> str:
    """Where it would be right."""
    homes = [other for other in table if key in table[other]]
    homes = [SHARED] if SHARED in homes else homes[:1]
    if homes and not _close(key, table[section]):
        return f"; the section {homes[0]} has one"
    return _nearest(key, table[section])


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = _close(name, known)
    return f"; is it {close[0]!r}?" if close else "; `unicron config show --all` lists what there is"


def _close(name: str, known: Mapping[str, Any]) -> list[str]:
    return difflib.get_close_matches(name, known, 1)
