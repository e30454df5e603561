"""Which source of a setting counts: flag, then environment, then file, then default. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from unicron_elastic.launcher.config.file import FileSetting
from unicron_elastic.launcher.config.settings import Setting, Use

SOURCES = ("flag", "environment", "file", "default")  # the first that has a value counts


@dataclass(frozen=True, slots=True)
class Resolved:
    """A setting as a command would use it."""

    setting: Setting
    text: str  # "" if nothing says anything
    source: str  # one of SOURCES
    origin: str  # the flag, the variable, FILE:LINE or "default"

    @property
    def shown(self) -> str:
        """For people and logs: not what a secret is."""
        return "(set)" if self.setting.is_secret and self.text else self.text

    def to_json(self) -> dict[str, object]:
        """For programs; a value that is a number or a switch is one."""
        setting, kind = self.setting, self.setting.kind
        value: object = self.shown or None
        if self.text and kind.name in ("whole number", "number", "on or off"):
            value = kind.parse(self.text)
        return {
            "section": setting.section,
            "key": setting.key,
            "value": value,
            "source": self.source,
            "origin": self.origin,
            "type": kind.name,
            "unit": kind.unit,
            "variables": list(setting.variables),
            "is_secret": setting.is_secret,
        }


def resolve(
    use: Use,
    given: Mapping[str, tuple[str, str]],
    environ: Mapping[str, str],
    entries: Mapping[tuple[str, str], FileSetting],
) -> Resolved:
    """Tell which source of one setting counts.

    ``given`` has what the command line says, by the setting's name: flag and text. Raises ValueError for a value that
    is not possible, which names its source.
    """
    setting = use.setting
    if setting.name in given:
        flag, text = given[setting.name]
        found = Resolved(setting, text, "flag", flag)
    elif variable := setting.variable(environ):
        found = Resolved(setting, environ[variable], "environment", variable)
    elif (entry := from_file(setting, environ, entries)) is not None:
        found = Resolved(setting, entry.text, "file", entry.place)
    else:
        return Resolved(setting, setting.default, "default", "default")
    setting.value(found.text, found.origin)
    return found


def from_file(
    setting: Setting, environ: Mapping[str, str], entries: Mapping[tuple[str, str], FileSetting]
) -> FileSetting | None:
    """What the file says of it, unless the environment has it."""
    if setting.variable(environ) or _any_is_set(setting.rivals, environ):
        return None
    return entries.get((setting.section, setting.key))


def _any_is_set(names: Iterable[str], environ: Mapping[str, str]) -> bool:
    return any(environ.get(name, "").strip() for name in names)
