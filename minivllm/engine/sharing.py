"""Block sharing: asks the publication policy and the coordinator at each point of a request's life.

    scheduler   about to admit ─► may_admit      go, hold, or look again
                admitted, preempted, allocated
    core        after a step   ─► computed       publish what the policy allows; release held requests
                request ended  ─► ended

Knows the publication policy, the coordinator and the manager. Must not know how rows are chosen or computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from minivllm.cache.block_hash import BlockHash
from minivllm.cache.block_table import ComputedBlocks
from minivllm.cache.kv_cache_manager import KVCacheManager
from minivllm.cache.publication import Moment, is_safe
from minivllm.config import EngineConfig, policy_name
from minivllm.coordination.coordinator import Outlook
from minivllm.errors import ConfigError
from minivllm.log import events as ev
from minivllm.log.states import Role
from minivllm.request import Request, RequestState
from minivllm.scheduling.hooks import Verdict
from minivllm.step import Runner


class BlockSharing:
    """Publishes blocks as the publication policy allows, and reports a request's progress to the coordinator.

    It implements `SchedulerHooks`. ``requests`` are all requests of the engine by id; ``release`` moves held requests
    back to the waiting list.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        manager: KVCacheManager,
        requests: Mapping[str, Request],
        release: Callable[[Iterable[str]], None],
        emit: Callable[[ev.Event], None],
    ) -> None:
        self._runner = runner
        self._manager = manager
        self._requests = requests
        self._release = release
        self._emit = emit
        self.use(config)
        self._coordinated: set[str] = set()  # ids that the coordinator knows

    def use(self, config: EngineConfig) -> None:
        """Switch to the policies of ``config``, with a new coordinator.

        Raises ConfigError, with nothing changed, for an unsafe publication policy on a real model, unless
        ``allow_unsafe`` names it.
        """
        name = policy_name(config.publication_policy)
        if self._runner.is_real and not is_safe(config.publication_policy) and config.allow_unsafe != name:
            raise ConfigError(
                f"publication {name!r} lets requests read K/V that was never computed; it is for teaching, on the "
                f'virtual model, or with allow_unsafe="{name}" on {self._runner.name!r}'
            )
        coordinator = config.coordination_policy(config.release_policy, self._emit)
        if getattr(coordinator, "cost", None) is None:
            coordinator.cost = getattr(self._runner, "cost", None)
        self.config, self.coordinator = config, coordinator

    def arrive(self, request: Request) -> bool:
        """Report a new request to the coordinator. Returns whether it is to be held."""
        if not self.config.enable_prefix_caching:  # nothing is published, so there is nothing to wait for
            return False
        missing = None
        if self.coordinator.asks_what_is_missing:
            found = len(self._manager.get_computed_blocks(request).block_ids)
            missing = self._manager.chain_hashes(request)[found : self._num_usable(request)]
        role = self.coordinator.arrive(request, missing)
        if role is not None:
            self._coordinated.add(request.request_id)
        return role is Role.FOLLOWER

    def _num_usable(self, request: Request) -> int:
        """Blocks that the request could take from the cache: its last token is computed in any case."""
        return (request.num_tokens - 1) // self._manager.block_size

    # -- Hooks of the scheduler ----------------------------------------------------------------------------

    def may_admit(self, request: Request, computed: ComputedBlocks, budget_left: int) -> Verdict:
        """Ask the coordinator whether a waiting request may run, given what is published for it."""
        if request.request_id not in self._coordinated:
            return Verdict.GO
        outlook = Outlook(
            hashes=self._manager.chain_hashes(request),
            num_found=len(computed.block_ids),
            num_usable=self._num_usable(request),
            block_size=self._manager.block_size,
            chunk_limit=self.config.chunk_limit,
            budget=self.config.max_num_batched_tokens,
            budget_left=budget_left,
        )
        if self._publish_what_is_ready(outlook):
            return Verdict.LOOK_AGAIN
        return Verdict.GO if self.coordinator.may_admit(request, outlook) else Verdict.HOLD

    def _publish_what_is_ready(self, outlook: Outlook) -> bool:
        """Publish a leader's computed blocks if the request's next missing block is among them. Returns whether it did.

        Under a policy that publishes late, a leader publishes early only while a request waits for it. This covers
        the blocks that it computed before.
        """
        if outlook.num_found >= outlook.num_usable:
            return False
        leader_id = self.coordinator.who_computes(outlook.hashes[outlook.num_found])
        if leader_id is None:
            return False
        leader = self._requests[leader_id]
        ready = min(leader.num_computed_tokens, leader.num_prompt_tokens)
        if ready < (outlook.num_found + 1) * outlook.block_size:
            return False
        return bool(self._publish(leader, ready))

    def admitted(self, request: Request) -> None:
        """Report to the coordinator which prompt blocks the request will compute."""
        if request.request_id in self._coordinated:
            size = self._manager.block_size
            first, last = request.num_computed_tokens // size, request.num_prompt_tokens // size
            self.coordinator.admitted(request, self._manager.chain_hashes(request)[first:last])

    def preempted(self, request: Request) -> None:
        """Report the preemption to the coordinator, which may release requests that waited for its blocks."""
        if request.request_id in self._coordinated:
            self._release(self.coordinator.preempted(request.request_id))

    def allocated(self, request: Request, num_tokens: int) -> None:
        """Publish blocks that are not computed yet, if an unsafe policy asks for it."""
        if not is_safe(self.config.publication_policy):
            self.publish_visible(request, Moment.ALLOCATED, num_tokens)

    # -- After the forward pass ----------------------------------------------------------------------------

    def computed(self, request: Request) -> None:
        """Publish after a step what the policy allows; in the step that completes the prompt, what its flight needs."""
        self.publish_visible(request, Moment.STEP_DONE, request.num_computed_tokens)
        # With output tokens the prompt was complete before, even if a preempted request computes it again.
        if request.output_token_ids or request.num_computed_tokens < request.num_prompt_tokens:
            return
        self._emit(ev.PrefillFinished(request.request_id))
        if self.coordinator.wants_prompt(request.request_id):
            self._publish(request, request.num_prompt_tokens)
            self._release(self.coordinator.prompt_published(request.request_id))

    def publish_visible(self, request: Request, moment: Moment, num_tokens: int) -> None:
        """Publish what the policy allows of the request's first ``num_tokens`` tokens, or more if followers need it.

        Raises ConfigError for a policy that does not return a whole number of 0 or more.
        """
        policy = self.config.publication_policy
        visible = policy.visible_tokens(num_tokens, moment)
        if not isinstance(visible, int) or visible < 0:
            raise ConfigError(
                f"publication policy {policy_name(policy)!r} says that {visible!r} tokens may be visible; "
                "it must return a whole number of 0 or more"
            )
        if self.coordinator.wants_blocks(request.request_id):
            visible = max(visible, min(request.num_computed_tokens, request.num_prompt_tokens))
        if visible:
            self._publish(request, min(visible, num_tokens), before_computed=moment is Moment.ALLOCATED)

    def _publish(self, request: Request, num_tokens: int, *, before_computed: bool = False) -> Sequence[BlockHash]:
        """Publish blocks and report newly settled ones to the coordinator. Returns their hashes."""
        hashes = self._manager.publish(request, num_tokens, before_computed=before_computed)
        if hashes:
            self._release(self.coordinator.published(request.request_id, hashes))
        return hashes

    # -- Ends ----------------------------------------------------------------------------------------------

    def ended(self, request_id: str, end: RequestState, *, prompt_is_published: bool) -> None:
        """Report the end of a request to the coordinator, which may release others."""
        if request_id in self._coordinated:
            self._coordinated.remove(request_id)
            self._release(self.coordinator.request_ended(request_id, end, prompt_is_published=prompt_is_published))
