"""Arms: what is compared within one run. An arm is a policy of the server, another server, or the server left alone.

auto            set this policy on the server under test before each block
-               the server as it is
plain=http://h  another server, as it is: a boot without a drafter, or another engine
"""

from __future__ import annotations

from dataclasses import dataclass

from wingbeat.errors import ConfigError

NO_ARM = "-"
"""The arm of a server that is left alone."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One contestant; its `name` stands in every record."""

    name: str
    url: str
    policy: str | None
    """None leaves the server alone."""


def parse_arms(texts: tuple[str, ...], url: str) -> tuple[Arm, ...]:
    """Arms in the order given; `url` is the server under test. Raises ConfigError for repeated names."""
    arms = tuple(_parse(text, url.rstrip("/")) for text in texts)
    names = [arm.name for arm in arms]
    if not arms or len(set(names)) != len(names):
        raise ConfigError("arms", " ".join(texts), "at least one, each name once")
    return arms


def _parse(text: str, url: str) -> Arm:
    name, _, rest = text.partition("=")
    # A table policy holds "=" too; only an address makes a name of what stands before it.
    if name and rest.startswith(("http://", "https://")):
        return Arm(name, rest.rstrip("/"), None)
    return Arm(text, url, None if text == NO_ARM else text)
