"""The controls of a race: what may be chosen, with which limits, and the race that follows.

Knows settings, policies and races. Must not know engines that run, or the page.
"""

from __future__ import annotations

from typing import Any

from minivllm.bench import Race
from minivllm.cache import AT_ALLOCATION
from minivllm.config import EngineConfig, policy_name
from minivllm.errors import ConfigError, UnknownNameError, nearest

MAX_REQUESTS = 16

_CHOICES: dict[str, list[tuple[str, str]]] = {
    "prompts": [("same", "the same"), ("shared", "a shared prefix"), ("different", "all different")],
    "arrival": [("together", "together"), ("staggered", "one by one")],
    "publication": [
        ("on-completion", "on completion"),
        ("incremental", "incremental"),
        (AT_ALLOCATION.name, "at allocation (unsafe)"),
    ],
    "coordination": [
        ("independent", "independent"),
        ("single-flight", "single flight"),
        ("shared-prefix", "shared prefix"),
        ("wait-or-recompute", "wait or recompute"),
    ],
    "release": [("after-prefill", "after prefill"), ("on-completion", "on completion")],
    "cache": [("cold", "cold: reset first"), ("warm", "warm: keep it")],
    "speed": [("2", "2 steps a second"), ("8", "8 steps a second"), ("25", "25 steps a second"), ("0", "at once")],
}


def make_fields(
    config: EngineConfig, options: dict[str, Any], *, is_virtual: bool, has_pace: bool
) -> list[dict[str, Any]]:
    """Return the controls: each a name, a label, a group, a value, and choices or limits.

    ``options`` are values to begin with, by name. Raises UnknownNameError for a control or a choice that does not
    exist.
    """
    values: dict[str, Any] = {
        "num_requests": 8,
        "prompts": "same",
        "prompt_tokens": 532,
        "shared_tokens": 512,
        "max_tokens": 32,
        "arrival": "together",
        "publication": config.publication_policy.name,
        "coordination": policy_name(config.coordination),
        "release": config.release_policy.name,
        "cache": "cold",
        "speed": "8",
    }
    for name, value in options.items():
        if name not in values:
            raise UnknownNameError(f"the console has no control {name!r}; {nearest(name, values)}")
        known = [choice for choice, _ in _CHOICES.get(name, [])]
        if known and value not in known:
            raise UnknownNameError(f"{name} has no choice {value!r}; {nearest(value, known)}")
        values[name] = value

    def number(name: str, label: str, least: int, most: int) -> dict[str, Any]:
        limits = {"min": least, "max": most, "value": values[name]}
        return {"name": name, "label": label, "group": "Race", **limits}

    def choice(name: str, label: str, group: str) -> dict[str, Any]:
        # A real model refuses what is unsafe, so that is not offered there.
        offered = [pair for pair in _CHOICES[name] if pair[0] != AT_ALLOCATION.name or is_virtual]
        choices = [list(pair) for pair in offered]
        if values[name] not in [value for value, _ in choices]:
            choices.append([values[name], values[name]])  # a policy of the caller's own
        return {"name": name, "label": label, "group": group, "choices": choices, "value": values[name]}

    most = config.num_blocks * config.block_size
    fields = [
        number("num_requests", "Requests", 1, MAX_REQUESTS),
        choice("prompts", "Prompts", "Race"),
        number("prompt_tokens", "Prompt tokens", 1, most),
        number("shared_tokens", "Shared tokens", 0, most),
        number("max_tokens", "Output tokens", 1, most),
        choice("arrival", "Arrive", "Race"),
        choice("publication", "Publish blocks", "Rules"),
        choice("coordination", "Coordination", "Rules"),
        choice("release", "Release followers", "Rules"),
        choice("cache", "Cache", "Rules"),
    ]
    if has_pace:
        fields.append(choice("speed", "Slow motion", "Rules"))
    return fields


def race_of(fields: list[dict[str, Any]], options: dict[str, Any]) -> Race:
    """Return the race that ``options`` describe: a value for each control.

    Raises ConfigError for a number outside of its limits, UnknownNameError for a choice that does not exist.
    """
    for name, value in options.items():
        if name in _CHOICES and name not in ("publication", "coordination", "release"):
            known = [choice for choice, _ in _CHOICES[name]]
            if value not in known:
                raise UnknownNameError(f"{name} has no choice {value!r}; {nearest(value, known)}")
    for field in fields:
        value = options[field["name"]]
        if "choices" in field or (field["name"] == "shared_tokens" and options["prompts"] != "shared"):
            continue
        least, most = field["min"], field["max"]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            is_what = "is empty" if value is None else f"is {value}"
            raise ConfigError(f"{field['label']} {is_what}; give a whole number from {least} to {most:,}")
    shared = {"same": None, "shared": options["shared_tokens"], "different": 0}[options["prompts"]]
    return Race(
        num_requests=options["num_requests"],
        prompt_tokens=options["prompt_tokens"],
        shared_tokens=shared,
        max_tokens=options["max_tokens"],
        arrival=options["arrival"],
    )
