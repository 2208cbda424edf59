"""One model as a gateway sees it: its replicas, who runs, who waits, and what it last failed with.

`Backlog` is the only place that decides whether a request may go to an engine. It knows no HTTP and
no Ray: replicas are put in and taken out by the gateway, requests come and go through `acquire` and
`Slot.release`. Everything happens in one event loop, so there are no locks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from flexinfer.scheduling import Demand
from flexinfer.serving.args import GatewayModel
from flexinfer.serving.errors import Busy, RequestError, Unavailable
from flexinfer.serving.slots import Replica, Slot
from flexinfer.serving.status import ReplicaState, ReplicaStatus

FIRST_BACKOFF_S = 5.0
LAST_BACKOFF_S = 300.0
_ANY_PAUSE_S = 1.0


@dataclass(frozen=True)
class Failure:
    message: str
    log_tail: tuple[str, ...]
    retry_at: float
    """On the monotonic clock."""
    backoff_s: float
    replica: str
    """Id of the replica that failed."""


@dataclass(eq=False)
class _Waiter:
    future: asyncio.Future[Slot]
    since: float


class Backlog:
    """The queue and the replicas of one model."""

    def __init__(
        self, config: GatewayModel, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.replicas: dict[str, Replica] = {}
        self.failure: Failure | None = None
        self.load_wish = False
        self.unload_wish = False
        self.activation_s: float | None = None
        """How long the last activation took, from the first waiter to a serving replica."""
        self._clock = clock
        self._waiters: deque[_Waiter] = deque()
        self._last_activity = clock()
        self._ever_active = False
        self._waiting_since: float | None = None
        self._watchers: set[asyncio.Event] = set()

    # -- for requests

    async def acquire(self, never: Callable[[], str | None] = lambda: None) -> Slot:
        """Wait for a place at an engine.

        `never` says why the model cannot run at all on the nodes that there are, or None.
        Raises `Unavailable` (parked, failed, cannot run, did not come up in
        `coldStartTimeoutSeconds`) and `Busy` (queue full). Cancelling leaves the queue at once.
        """
        slot = None if self._waiters or self.config.parked else self._try()
        if slot is not None:
            return slot
        self._refuse_hopeless(never())
        if len(self._waiters) >= self.config.max_queued_requests:
            raise self._queue_full()
        waiter = _Waiter(asyncio.get_running_loop().create_future(), self._clock())
        self._waiters.append(waiter)
        if self._waiting_since is None and not self.serving:
            self._waiting_since = waiter.since
        self._changed()
        try:
            return await self._wait(waiter)
        except BaseException:
            future = waiter.future
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()  # granted in the moment in which its client left
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            if not self._waiters:
                self._waiting_since = None
            self._touch()
            self._changed()

    async def _wait(self, waiter: _Waiter) -> Slot:
        # The engine's own start is bounded by its replica; this bounds all that comes before it,
        # and the turn of others while it serves.
        timeout = self.config.cold_start_timeout_s
        while not (await asyncio.wait([waiter.future], timeout=timeout))[0]:
            # Fetching is not starting, and ends by itself when nothing comes any more.
            if self.serving or not self._fetching:
                break
        if waiter.future.done():
            return waiter.future.result()
        name = self.config.name
        if self.serving:
            raise Busy(
                f"no place at model {name} came free within {timeout:g} s",
                code="queue_timeout",
                retry_after_s=self.retry_after_s(),
            )
        raise Unavailable(
            f"model {name} did not come up within {timeout:g} s (coldStartTimeoutSeconds): "
            f"{self.describe()[1] or 'no reason known'}",
            code="model_start_timeout",
            retry_after_s=self.retry_after_s(),
        )

    def _refuse_hopeless(self, never: str | None) -> None:
        name = self.config.name
        if self.config.parked:
            raise Unavailable(
                f"model {name} is parked: its spec says replicas: 0",
                code="model_parked",
            )
        if never is not None:
            raise Unavailable(f"model {name} cannot run here: {never}", code="model_unschedulable")
        failure = self.current_failure()
        if failure is not None and not self.serving:
            raise self._failed(failure)

    def _failed(self, failure: Failure) -> Unavailable:
        return Unavailable(
            f"model {self.config.name} failed to start: {failure.message}",
            code="model_failed",
            retry_after_s=max(1.0, failure.retry_at - self._clock()),
        )

    def _queue_full(self) -> RequestError:
        kind = Busy if self.serving else Unavailable
        return kind(
            f"{len(self._waiters)} requests wait for model {self.config.name} already "
            "(maxQueuedRequests)",
            code="queue_full",
            retry_after_s=self.retry_after_s(),
        )

    def retry_after_s(self) -> float:
        """When asking again may help: after the usual activation, as far as it was measured."""
        if self.serving:
            return 1.0
        return max(1.0, self.activation_s or 5.0)

    # -- for the gateway

    @property
    def serving(self) -> bool:
        return any(r.state is ReplicaState.SERVING for r in self.replicas.values())

    @property
    def _fetching(self) -> bool:
        return any(r.status is not None and r.status.fetching for r in self.replicas.values())

    @property
    def queued(self) -> int:
        return len(self._waiters)

    @property
    def running(self) -> int:
        return sum(len(replica.running) for replica in self.replicas.values())

    @property
    def idle_s(self) -> float:
        """Since the last request ended; 0 while there are any, or weights are being brought."""
        busy = self._waiters or self.running or self._fetching
        return 0.0 if busy else self._clock() - self._last_activity

    @property
    def last_activity_s(self) -> float | None:
        """As `idle_s`; None if there was no request since this gateway started."""
        return self.idle_s if self._ever_active or self._waiters else None

    def demand(self) -> Demand:
        now = self._clock()
        failure = self.current_failure()
        return Demand(
            queued=self.queued,
            running=self.running,
            oldest_wait_s=now - self._waiters[0].since if self._waiters else 0.0,
            idle_s=self.idle_s,
            load=self.load_wish,
            unload=self.unload_wish,
            retry_in_s=max(
                failure.retry_at - now if failure is not None else 0.0,
                _ANY_PAUSE_S if self._failed_remains else 0.0,
            ),
        )

    @property
    def _failed_remains(self) -> bool:
        """Whether a failed replica is all that there is; Ray would take it for a new attempt."""
        states = {replica.state for replica in self.replicas.values()}
        return states == {ReplicaState.FAILED}

    def current_failure(self) -> Failure | None:
        """The failure that keeps the model down now; None when it may be tried (again)."""
        if self.failure is not None and self._clock() < self.failure.retry_at:
            return self.failure
        return None

    def add(self, replica: Replica) -> None:
        self.replicas[replica.id] = replica
        self._changed()

    def update(self, replica: Replica, status: ReplicaStatus) -> None:
        """A replica says how it is."""
        if self.replicas.get(replica.id) is not replica:
            return
        before = replica.state
        replica.status = status
        if status.state is not before:
            replica.since = self._clock()
        if status.state is ReplicaState.SERVING:
            self._came_up()
        elif status.state is ReplicaState.FAILED:
            self._fail(replica, status)
        elif status.state is ReplicaState.DRAINING:
            self._drain(replica)
        if status.state in (ReplicaState.STARTING, ReplicaState.FAILED):
            self._lose_running(replica, status.message or "the engine is being started")
        self._grant()
        self._changed()

    def remove(self, replica: Replica) -> None:
        """A replica is gone: its lease has ended."""
        if self.replicas.get(replica.id) is replica:
            del self.replicas[replica.id]
        if replica.preempt is not None:
            replica.preempt.cancel()
        self._lose_running(replica, "the replica has ended")
        self._touch()
        self._changed()

    def reconfigure(self, config: GatewayModel) -> None:
        self.config = config
        if config.parked:
            self._refuse_all(
                lambda: Unavailable(f"model {config.name} was parked", code="model_parked")
            )
        for replica in self.replicas.values():
            if replica.state is ReplicaState.DRAINING:
                self._drain(replica)  # its timeout may have changed
        self._grant()
        self._changed()

    def refuse_all(self, make: Callable[[], RequestError]) -> None:
        """End every waiting request with an error of its own."""
        self._refuse_all(make)
        self._changed()

    def describe(self) -> tuple[str, str]:
        """State and its reason in the words of `GET /-/models`."""
        states = [replica.state for replica in self.replicas.values()]
        failure = self.current_failure()
        if ReplicaState.SERVING in states:
            return "serving", ""
        if ReplicaState.STARTING in states:
            messages = [r.status.message for r in self.replicas.values() if r.status is not None]
            return "starting", next((m for m in messages if m), "the engine is loading the model")
        if failure is not None:
            return "failed", failure.message
        if ReplicaState.DRAINING in states:
            return "draining", "running requests end before it leaves"
        if self.config.parked:
            return "parked", "replicas is 0: no request wakes it"
        if self._waiters:
            return "queued", "waiting for a replica to start"
        return "zero", ""

    def watch(self) -> asyncio.Event:
        """An event that is set at every change; give it back to `unwatch`."""
        event = asyncio.Event()
        self._watchers.add(event)
        return event

    def unwatch(self, event: asyncio.Event) -> None:
        self._watchers.discard(event)

    # -- inside

    def _try(self) -> Slot | None:
        best: Replica | None = None
        for replica in self.replicas.values():
            if replica.state is not ReplicaState.SERVING or replica.engine is None:
                continue
            limit = self.config.max_ongoing_requests or replica.engine.parallel
            free = len(replica.running) < limit
            if free and (best is None or len(replica.running) < len(best.running)):
                best = replica
        if best is None or best.engine is None:
            return None
        slot = Slot(best, best.engine, self._release)
        best.running.add(slot)
        self._ever_active = True
        self._touch()
        return slot

    def _grant(self) -> None:
        while self._waiters:
            if self._waiters[0].future.done():
                self._waiters.popleft()
                continue
            slot = self._try()
            if slot is None:
                return
            self._waiters.popleft().future.set_result(slot)

    def _release(self, slot: Slot) -> None:
        slot.replica.running.discard(slot)
        self._touch()
        if slot.replica.state is ReplicaState.DRAINING:
            self._let_go(slot.replica)
        self._grant()
        self._changed()

    def _came_up(self) -> None:
        if self._waiting_since is not None:
            self.activation_s = self._clock() - self._waiting_since
            self._waiting_since = None
        self.failure = None
        self.load_wish = False

    def _fail(self, replica: Replica, status: ReplicaStatus) -> None:
        now, last = self._clock(), self.failure
        if last is None:
            backoff = FIRST_BACKOFF_S
        elif last.replica == replica.id:
            return  # heard before: its lease was only taken anew
        elif now < last.retry_at:
            backoff = last.backoff_s  # of the same attempt: no other has been made since
        else:
            backoff = min(last.backoff_s * 2, LAST_BACKOFF_S)
        tail = tuple(status.log_tail)
        failure = Failure(status.message, tail, now + backoff, backoff, replica.id)
        self.failure = failure
        self.load_wish = False
        if not self.serving:
            self._refuse_all(lambda: self._failed(failure))

    def _drain(self, replica: Replica) -> None:
        if not self._let_go(replica):
            if replica.preempt is not None:
                replica.preempt.cancel()
            left = replica.since + self.config.drain_timeout_s - self._clock()
            loop = asyncio.get_running_loop()
            replica.preempt = loop.call_later(max(0.0, left), self._preempt, replica)

    def _preempt(self, replica: Replica) -> None:
        for slot in list(replica.running):
            if not slot.lost.done():
                slot.lost.set_result(
                    Unavailable(
                        f"model {self.config.name} had to leave: drainTimeoutSeconds "
                        f"({self.config.drain_timeout_s:g} s) have passed",
                        code="preempted",
                        retry_after_s=self.retry_after_s(),
                    )
                )

    def _let_go(self, replica: Replica) -> bool:
        if replica.running:
            return False
        replica.link.release()
        return True

    def _lose_running(self, replica: Replica, why: str) -> None:
        for slot in list(replica.running):
            if not slot.lost.done():
                slot.lost.set_result(
                    Unavailable(
                        f"the engine of model {self.config.name} ended under the request: {why}",
                        code="engine_lost",
                        retry_after_s=1.0,
                    )
                )

    def _refuse_all(self, make: Callable[[], RequestError]) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.future.done():
                waiter.future.set_exception(make())

    def _touch(self) -> None:
        self._last_activity = self._clock()

    def _changed(self) -> None:
        for event in self._watchers:
            event.set()
