"""The race in words: what is raced, and why so many tokens were recovered.

Knows the figures and the log of a race. Must not know how it is run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.bench.workloads import Race
from minivllm.config import EngineConfig
from minivllm.log import events as ev

if TYPE_CHECKING:
    from minivllm.bench.race import RaceResult


def race_heading(race: Race, config: EngineConfig, model: str) -> str:
    """Return one line that says what is raced."""
    shared = race.num_shared_tokens
    if race.num_requests == 1:
        what = f"1 request of {race.prompt_tokens:,} tokens"
    elif shared == race.prompt_tokens:
        what = f"{race.num_requests} identical requests of {shared:,} tokens"
    else:
        what = f"{race.num_requests} requests of {race.prompt_tokens:,} tokens, the first {shared:,} shared"
    if race.samples > 1:
        what += f", {race.samples} samples of each"
    coordination = config.as_dict()["coordination"]
    if coordination == "single-flight":
        coordination += f", released {config.release_policy.name}"
    if config.adoption:
        coordination += ", with adoption"
    return (
        f"{what}, {race.max_tokens:,} output tokens each, on a cold cache of {model}: "
        f"published {config.publication_policy.name}, {coordination}"
    )


def explain(result: RaceResult) -> str:
    """Return why so many tokens were recovered, from what the log says."""
    later = [request for request in result.requests if request.role != "sample"][1:]
    if not later:
        alone = "One request on a cold cache has nothing to recover."
        return " ".join([alone, *_about_samples(result)])
    block_size = result.config.block_size
    shared = result.race.num_shared_tokens
    asked = sum(request.prompt_tokens for request in later)
    found = sum(request.recovered_tokens for request in later)
    who = "the later request" if len(later) == 1 else f"the {len(later)} later requests"
    words = [f"{found:,} of {asked:,} prompt tokens of {who} were recovered: {_cause(result, found)}."]
    best = min(shared, result.race.prompt_tokens - 1) // block_size * block_size
    if found and best < result.race.prompt_tokens and all(r.recovered_tokens == best for r in later):
        rest = result.race.prompt_tokens - best
        words.append(
            f"More than {best:,} each is not possible: only full blocks of {block_size} tokens are shared, "
            f"so {'the last token is' if rest == 1 else f'the last {rest:,} tokens are'} computed."
        )
    if result.metrics.duplicated_blocks:
        words.append(f"{result.metrics.duplicated_blocks:,} full blocks hold what another block holds already.")
    words.extend(_about_samples(result))
    if result.metrics.adopted_tokens:
        words.append(
            f"{result.metrics.adopted_tokens:,} tokens more were adopted in mid-prefill, from blocks that others had "
            "published meanwhile."
        )
    preempted = sum(request.num_preemptions for request in result.requests)
    if preempted:
        words.append(
            f"Blocks ran out, so requests were preempted ({preempted} in all); what they found of their own work "
            "when they went on is not counted."
        )
    return " ".join(words)


def _about_samples(result: RaceResult) -> list[str]:
    """Say what the samples of a prompt share, if there are several."""
    samples = sum(request.role == "sample" for request in result.requests)
    if not samples:
        return []
    copied = sum(isinstance(event, ev.BlockCopied) for event in result.log)
    return [
        f"{samples:,} further samples took their prompt's blocks from the first one, which computed it for all; "
        f"{copied:,} partly filled blocks were copied when a sample first wrote into one (copy on write)."
    ]


def _cause(result: RaceResult, found: int) -> str:
    """Return the one reason that explains the recovered tokens best."""
    shared, block_size = result.race.num_shared_tokens, result.config.block_size
    first = result.requests[0]
    followers = [request for request in result.requests if request.role == "follower"]
    if not result.config.enable_prefix_caching:
        return "prefix caching is off"
    if min(shared, result.race.prompt_tokens - 1) < block_size:
        return f"the prompts share less than one full block of {block_size} tokens before their last one"
    if followers and found:
        leaders = [r.request_id for r in result.requests if r.role == "leader"]
        until = "computed and published its prompt"
        if not result.config.release_policy.after_prefill(len(followers)):
            until = "ended and its blocks were published"
        held = "1 follower was held until its leader"
        if len(followers) > 1:
            held = f"{len(followers)} followers were held until their leader"
        return f"{held}, {leaders[0]}, had {until}"
    chose = sum(isinstance(event, ev.RecomputeChosen) for event in result.log)
    if chose and not found:
        return (
            f"{chose} of them computed what another request was computing at the same time, because that was sooner "
            "than waiting for it"
        )
    num_held = sum(request.role == "held" for request in result.requests)
    if num_held and found:
        verb = "was" if num_held == 1 else "were"
        return (
            f"{num_held} of them {verb} held while another was computing the next missing block, until it was published"
        )
    when = {
        "on-completion": "when its request ends",
        "incremental": "after the step that computed it",
        "at-allocation": "before it is computed, which is not safe",
    }
    rule = when.get(result.config.publication_policy.name, "as the policy says")
    if found:
        late = sum(request.recovered_tokens > 0 for request in result.requests)
        return f"a block is published {rule}, and {late} of them were admitted after that"
    if result.config.publication_policy.name == "on-completion":
        return f"nothing was published before {first.request_id} ended, and by then all had been admitted"
    return f"a block is published {rule}, and all were admitted before that"
