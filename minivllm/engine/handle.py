"""A caller's end of a request: its tokens as they come, and its result.

Knows one request and threads that wait for it. Must not know the engine, but for two questions that an `Owner` answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from minivllm.engine.output import Output
from minivllm.errors import EngineDeadError, MiniVLLMError, RequestFailedError


@dataclass(frozen=True, slots=True)
class Token:
    """An output token and the text that became certain with it (perhaps none, or more than its own)."""

    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What came of a request.

    ``finish_reason`` is "length", "stop" or "abort". Times are milliseconds; ``ttft_ms`` is None if no token
    came out.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    recovered_tokens: int
    ttft_ms: float | None
    completion_ms: float | None


class Owner(Protocol):
    """What a handle asks of the engine that serves its request."""

    thread: threading.Thread

    @property
    def is_over(self) -> bool:
        """Whether the engine is dead or closed, or about to be."""
        ...

    def abort(self, request_id: str) -> bool:
        """Abort a request; False if it, or the whole engine, has ended."""
        ...


class Handle:
    """A caller's end of one request. Iterate it for tokens as they come, or ask for `result()`.

    A prompt with several samples has a handle for each, and ``samples`` of each holds them all; `submit` returns the
    first. Each is awaited and aborted by itself.
    """

    def __init__(self, request_id: str, prompt_token_ids: tuple[int, ...], owner: Owner) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.samples: tuple[Handle, ...] = (self,)
        self._owner = owner
        self._changed = threading.Condition()
        self._tokens: list[Token] = []
        self._result: RequestResult | None = None
        self._error: BaseException | None = None
        self._engine_died = False
        self._wakers: list[Callable[[], object]] = []

    @property
    def done(self) -> bool:
        """Whether the request has ended, in whatever way."""
        return self._result is not None or self._error is not None

    @property
    def tokens(self) -> list[Token]:
        """The tokens so far, as a new list."""
        with self._changed:
            return list(self._tokens)

    def result(self, timeout: float | None = None) -> RequestResult:
        """Wait for the end and return it.

        Raises what ended the request if it failed, and TimeoutError after ``timeout`` seconds; the request
        goes on then.
        """
        self._check_thread()
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"request {self.request_id!r} has not ended after {timeout} s; it continues")
        return self._outcome()

    def _outcome(self) -> RequestResult:
        if self._result is None:
            kind = EngineDeadError if self._engine_died else RequestFailedError
            raise kind(
                f"request {self.request_id!r} failed ({type(self._error).__name__}: {self._error})"
            ) from self._error
        return self._result

    def _check_thread(self) -> None:
        if not self.done and threading.current_thread() is self._owner.thread:
            raise MiniVLLMError(
                f"request {self.request_id!r} was waited for on the engine's own thread, which would never end; "
                "wait for it where it was submitted"
            )

    def __iter__(self) -> Iterator[Token]:
        """Yield each token when it comes out. Raises what ended the request if it failed."""
        place = 0
        while True:
            self._check_thread()
            with self._changed:
                self._changed.wait_for(lambda place=place: self.done or len(self._tokens) > place)  # type: ignore[misc]
                fresh, ended = self._tokens[place:], self.done
            yield from fresh
            place += len(fresh)
            if ended and place == len(self._tokens):
                self._outcome()
                return

    def __await__(self) -> Generator[Any, None, RequestResult]:
        """``await handle`` is `result()` for a coroutine: the event loop goes on meanwhile."""
        return self._wait_async().__await__()

    async def _wait_async(self) -> RequestResult:
        while not self.done:
            await self._change()
        return self._outcome()

    async def __aiter__(self) -> AsyncIterator[Token]:
        """Yield each token when it comes out, without blocking the event loop."""
        place = 0
        while True:
            fresh, ended = self.tokens[place:], self.done
            for token in fresh:
                yield token
            place += len(fresh)
            if ended and place == len(self._tokens):
                self._outcome()
                return
            if not fresh:
                await self._change(place)

    async def _change(self, place: int | None = None) -> None:
        """Wait until the request has ended, or has more than ``place`` tokens."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        with self._changed:
            if self.done or (place is not None and len(self._tokens) > place):
                return
            self._wakers.append(functools.partial(loop.call_soon_threadsafe, woken.set))
        await woken.wait()

    def abort(self) -> bool:
        """Take the request back. Returns False if it has ended already; calling it twice is fine."""
        return not self.done and self._owner.abort(self.request_id)

    def push(self, output: Output, result: RequestResult | None) -> None:
        """Engine thread: take a token in, or an end."""
        with self._changed:
            if output.token_id is not None:
                self._tokens.append(Token(output.token_id, output.text))
            self._result, self._error = result, output.error
            # Now, and not when the result is asked for: the engine may be closed in good order later.
            self._engine_died = output.error is not None and self._owner.is_over
            wakers, self._wakers = self._wakers, []
            self._changed.notify_all()
        for wake in wakers:
            with contextlib.suppress(RuntimeError):  # that event loop was closed meanwhile: nobody waits there
                wake()

    def __repr__(self) -> str:
        state = "ended" if self.done else "running"
        return f"Handle({self.request_id!r}, {len(self._tokens)} tokens, {state})"
