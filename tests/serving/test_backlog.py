"""Who may go to an engine, who waits, and who is told to go away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_helpers import (
    Clock,
    add_replica,
    gateway_model,
    replica_status,
    settle,
    until,
)

from flexinfer.serving.backlog import FIRST_BACKOFF_S, LAST_BACKOFF_S, Backlog
from flexinfer.serving.errors import Busy, NotFound, RequestError, Unavailable
from flexinfer.serving.slots import Slot
from flexinfer.serving.status import ReplicaState


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(clock: Clock) -> Callable[..., Backlog]:
    return lambda **changes: Backlog(gateway_model(**changes), clock=clock)


def ask(backlog: Backlog) -> asyncio.Task[Slot]:
    return asyncio.get_running_loop().create_task(backlog.acquire())


async def refused(task: asyncio.Task[Slot]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await task
    return caught.value


# -- places


async def test_a_free_place_is_given_at_once(make: Any) -> None:
    backlog = make()
    replica = add_replica(backlog)
    slot = await backlog.acquire()
    assert slot.replica is replica
    assert (backlog.running, backlog.queued) == (1, 0)


async def test_places_are_as_many_as_the_engine_runs_in_parallel(make: Any) -> None:
    backlog = make()
    add_replica(backlog, parallel=2)
    await backlog.acquire()
    await backlog.acquire()
    third = ask(backlog)
    await settle()
    assert not third.done()
    third.cancel()


@pytest.mark.parametrize(("limit", "parallel"), [(1, 4), (4, 1)])
async def test_max_ongoing_requests_replaces_the_engines_own_number(
    make: Any, limit: int, parallel: int
) -> None:
    backlog = make(max_ongoing_requests=limit)
    add_replica(backlog, parallel=parallel)
    for _ in range(limit):
        await backlog.acquire()
    more = ask(backlog)
    await settle()
    assert not more.done()
    more.cancel()


async def test_who_came_first_is_served_first(make: Any) -> None:
    backlog = make()
    add_replica(backlog)
    running = await backlog.acquire()
    order: list[int] = []

    async def client(number: int) -> None:
        slot = await backlog.acquire()
        order.append(number)
        await asyncio.sleep(0)
        slot.release()

    clients = [asyncio.create_task(client(number)) for number in range(5)]
    await settle()
    running.release()
    await asyncio.gather(*clients)
    assert order == [0, 1, 2, 3, 4]
    assert backlog.running == 0


async def test_a_newcomer_does_not_overtake_the_queue(make: Any) -> None:
    backlog = make()
    add_replica(backlog)
    running = await backlog.acquire()
    waiting = ask(backlog)
    await settle()
    running.release()  # the place is the waiter's now, though its task has not run yet
    newcomer = ask(backlog)
    await settle()
    assert waiting.done()
    assert not newcomer.done()
    newcomer.cancel()


async def test_the_replica_with_the_fewest_requests_is_taken(make: Any) -> None:
    backlog = make()
    one = add_replica(backlog, name="one", parallel=4)
    two = add_replica(backlog, name="two", parallel=4)
    slots = [await backlog.acquire() for _ in range(4)]
    assert (len(one.running), len(two.running)) == (2, 2)
    for slot in slots:
        if slot.replica is two:
            slot.release()
    assert (await backlog.acquire()).replica is two


async def test_releasing_twice_gives_one_place(make: Any) -> None:
    backlog = make()
    add_replica(backlog)
    slot = await backlog.acquire()
    slot.release()
    other = await backlog.acquire()
    slot.release()
    assert backlog.running == 1
    other.release()
    assert backlog.running == 0


# -- the queue's end


async def test_a_full_queue_of_a_serving_model_is_too_many_requests(make: Any) -> None:
    backlog = make(max_queued_requests=1)
    add_replica(backlog)
    await backlog.acquire()
    waiting = ask(backlog)
    await settle()
    error = await refused(ask(backlog))
    assert isinstance(error, Busy)
    assert (error.status, error.code) == (429, "queue_full")
    assert error.retry_after_s is not None
    waiting.cancel()


async def test_a_full_queue_of_a_model_that_is_down_is_unavailable(make: Any) -> None:
    backlog = make(max_queued_requests=1)
    waiting = ask(backlog)
    await settle()
    error = await refused(ask(backlog))
    assert isinstance(error, Unavailable)
    assert (error.status, error.code) == (503, "queue_full")
    assert error.retry_after_s is not None
    waiting.cancel()


async def test_cancelling_in_the_queue_frees_the_place_in_it(make: Any) -> None:
    backlog = make(max_queued_requests=1)
    first = ask(backlog)
    await settle()
    first.cancel()
    await settle()
    assert backlog.queued == 0
    second = ask(backlog)
    await settle()
    assert backlog.queued == 1
    second.cancel()


async def test_cancelling_in_the_moment_of_the_grant_loses_no_place(make: Any) -> None:
    backlog = make()
    add_replica(backlog)
    running = await backlog.acquire()
    first, second = ask(backlog), ask(backlog)
    await settle()
    running.release()
    first.cancel()  # its place was granted, but its task has not learnt it yet
    slot = await asyncio.wait_for(second, 5)
    with pytest.raises(asyncio.CancelledError):
        await first
    assert backlog.running == 1
    slot.release()
    assert backlog.running == 0


async def test_a_place_that_comes_free_too_late_is_a_refusal(make: Any) -> None:
    backlog = make(cold_start_timeout_s=0.01)
    add_replica(backlog)
    await backlog.acquire()
    error = await refused(ask(backlog))
    assert (error.status, error.code) == (429, "queue_timeout")
    assert backlog.queued == 0


async def test_a_model_that_does_not_come_up_in_time_is_a_refusal(make: Any) -> None:
    error = await refused(ask(make(cold_start_timeout_s=0.01)))
    assert (error.status, error.code) == (503, "model_start_timeout")
    assert "coldStartTimeoutSeconds" in error.message


async def test_bringing_weights_is_not_part_of_the_start(make: Any, clock: Clock) -> None:
    backlog = make(cold_start_timeout_s=0.01)
    replica = add_replica(backlog, ReplicaState.STARTING, fetching=True, message="34 %")
    waiting = ask(backlog)
    await asyncio.wait([waiting], timeout=0.2)
    assert not waiting.done()
    assert backlog.describe() == ("starting", "34 %")
    waiting.cancel()
    await settle()
    clock.now += 1000
    assert backlog.idle_s == 0
    backlog.update(replica, replica_status(ReplicaState.STARTING))
    error = await refused(ask(backlog))
    assert error.code == "model_start_timeout"


# -- who is refused at once


async def test_a_parked_model_takes_no_request(make: Any) -> None:
    backlog = make(replicas=0)
    error = await refused(ask(backlog))
    assert (error.status, error.code) == (503, "model_parked")
    assert backlog.demand().wanted is False


async def test_parking_refuses_who_waits(make: Any) -> None:
    backlog = make()
    waiting = ask(backlog)
    await settle()
    backlog.reconfigure(gateway_model(replicas=0))
    assert (await refused(waiting)).code == "model_parked"


async def test_a_parked_model_that_is_still_up_takes_no_new_request(make: Any) -> None:
    backlog = make()
    add_replica(backlog, parallel=4)
    running = await backlog.acquire()
    backlog.reconfigure(gateway_model(replicas=0))
    assert (await refused(ask(backlog))).code == "model_parked"
    assert not running.lost.done()


async def test_a_model_that_fits_nowhere_is_refused_with_the_reason(make: Any) -> None:
    with pytest.raises(Unavailable, match="needs 8 GPUs") as caught:
        await make().acquire(lambda: "it needs 8 GPUs")
    assert caught.value.code == "model_unschedulable"


async def test_a_model_that_is_up_serves_whatever_the_nodes_say(make: Any) -> None:
    backlog = make()
    add_replica(backlog)
    await backlog.acquire(lambda: "no node is eligible")


async def test_a_removed_model_refuses_each_waiter_with_an_error_of_its_own(make: Any) -> None:
    backlog = make()
    waiting = [ask(backlog), ask(backlog)]
    await settle()
    backlog.refuse_all(lambda: NotFound("it was removed", code="model_not_found"))
    errors = [await refused(task) for task in waiting]
    assert [error.status for error in errors] == [404, 404]
    assert errors[0] is not errors[1]


# -- failures


async def test_a_failed_start_refuses_all_who_wait_and_all_who_come(make: Any, clock: Any) -> None:
    backlog = make()
    replica = add_replica(backlog, ReplicaState.STARTING)
    waiting = [ask(backlog), ask(backlog)]
    await settle()
    backlog.update(replica, replica_status(ReplicaState.FAILED, message="no such file"))
    late = ask(backlog)
    for task in (*waiting, late):
        error = await refused(task)
        assert (error.status, error.code) == (503, "model_failed")
        assert "no such file" in error.message
        assert error.retry_after_s == pytest.approx(FIRST_BACKOFF_S)
    assert backlog.demand().retry_in_s == pytest.approx(FIRST_BACKOFF_S)
    assert backlog.describe() == ("failed", "no such file")


async def test_who_comes_in_the_moment_of_the_failure_is_refused_too(make: Any) -> None:
    backlog = make()
    replica = add_replica(backlog, ReplicaState.STARTING)
    arriving = ask(backlog)  # its task runs only after the failure
    backlog.update(replica, replica_status(ReplicaState.FAILED))
    assert (await refused(arriving)).code == "model_failed"


async def test_the_pause_after_failures_doubles_up_to_a_limit(make: Any, clock: Clock) -> None:
    backlog = make()
    pauses = []
    for attempt in range(9):
        replica = add_replica(backlog, ReplicaState.FAILED, name=f"r{attempt}")
        backlog.remove(replica)
        pauses.append(backlog.demand().retry_in_s)
        clock.now += pauses[-1]
        assert backlog.current_failure() is None
    assert pauses[:4] == [5, 10, 20, 40]
    assert pauses[-1] == LAST_BACKOFF_S


async def test_replicas_that_fail_together_are_one_failed_attempt(make: Any) -> None:
    backlog = make(replicas=3)
    for name in ("one", "two", "three"):
        add_replica(backlog, ReplicaState.FAILED, name=name)
    assert backlog.demand().retry_in_s == pytest.approx(FIRST_BACKOFF_S)


async def test_hearing_again_of_a_failure_is_not_another(make: Any, clock: Clock) -> None:
    backlog = make()
    failed = add_replica(backlog, ReplicaState.FAILED)
    clock.now += 60
    backlog.remove(failed)  # its connection broke; it is the same replica that comes back
    again = add_replica(backlog, ReplicaState.FAILED)
    backlog.remove(again)
    assert backlog.demand().retry_in_s == 0


async def test_no_attempt_is_made_before_the_failed_replica_has_gone(
    make: Any, clock: Clock
) -> None:
    """Ray would take the failed one for the attempt."""
    backlog = make()
    failed = add_replica(backlog, ReplicaState.FAILED)
    clock.now += FIRST_BACKOFF_S
    waiting = ask(backlog)
    await settle()
    assert backlog.demand().retry_in_s > 0
    backlog.remove(failed)
    assert backlog.demand().retry_in_s == 0
    assert not waiting.done()
    waiting.cancel()


async def test_after_the_pause_requests_wait_for_the_next_attempt(make: Any, clock: Clock) -> None:
    backlog = make()
    backlog.remove(add_replica(backlog, ReplicaState.FAILED))
    clock.now += FIRST_BACKOFF_S
    waiting = ask(backlog)
    await settle()
    assert backlog.demand().queued == 1
    add_replica(backlog, name="r2")
    await asyncio.wait_for(waiting, 5)


async def test_a_model_that_came_up_has_forgotten_its_failures(make: Any, clock: Clock) -> None:
    backlog = make()
    backlog.remove(add_replica(backlog, ReplicaState.FAILED))
    clock.now += FIRST_BACKOFF_S
    backlog.remove(add_replica(backlog, name="r2"))
    backlog.remove(add_replica(backlog, ReplicaState.FAILED, name="r3"))
    assert backlog.demand().retry_in_s == pytest.approx(FIRST_BACKOFF_S)


async def test_one_failed_replica_of_a_serving_model_refuses_nobody(make: Any) -> None:
    backlog = make(replicas=2)
    add_replica(backlog, name="good")
    running = await backlog.acquire()
    waiting = ask(backlog)
    await settle()
    add_replica(backlog, ReplicaState.FAILED, name="bad")
    assert not waiting.done()
    running.release()
    await asyncio.wait_for(waiting, 5)


# -- replicas that end under their requests


@pytest.mark.parametrize("state", [ReplicaState.STARTING, ReplicaState.FAILED])
async def test_an_engine_that_ended_takes_its_requests_with_it(
    make: Any, state: ReplicaState
) -> None:
    backlog = make()
    replica = add_replica(backlog)
    slot = await backlog.acquire()
    backlog.update(replica, replica_status(state, message="killed by signal 9"))
    error = slot.lost.result()
    assert (error.status, error.code) == (503, "engine_lost")
    assert "killed by signal 9" in error.message


async def test_a_replica_that_is_gone_takes_its_requests_with_it(make: Any) -> None:
    backlog = make(replicas=2)
    replica = add_replica(backlog, name="one")
    slot = await backlog.acquire()
    add_replica(backlog, name="two")
    other = await backlog.acquire()
    backlog.remove(replica)
    assert slot.lost.result().code == "engine_lost"
    assert not other.lost.done()
    slot.release()
    assert backlog.running == 1


async def test_an_engine_that_is_started_again_in_place_serves_who_waited(make: Any) -> None:
    backlog = make()
    replica = add_replica(backlog, port=1)
    old = await backlog.acquire()
    backlog.update(replica, replica_status(ReplicaState.STARTING))
    waiting = ask(backlog)
    await settle()
    assert not waiting.done()
    old.release()
    backlog.update(replica, replica_status(ReplicaState.SERVING, port=2))
    assert (await asyncio.wait_for(waiting, 5)).engine.port == 2


async def test_a_place_granted_in_the_tick_of_the_loss_says_so(make: Any) -> None:
    backlog = make()
    replica = add_replica(backlog)
    running = await backlog.acquire()
    waiting = ask(backlog)
    await settle()
    running.release()
    backlog.remove(replica)
    slot = await asyncio.wait_for(waiting, 5)
    assert slot.lost.done()
    slot.release()
    assert backlog.running == 0


async def test_waiters_outlive_a_replica_that_is_lost_while_it_starts(make: Any) -> None:
    backlog = make()
    replica = add_replica(backlog, ReplicaState.STARTING)
    waiting = ask(backlog)
    await settle()
    backlog.remove(replica)
    await settle()
    assert not waiting.done()
    add_replica(backlog, name="r2")
    await asyncio.wait_for(waiting, 5)


async def test_the_word_of_a_replica_that_was_replaced_counts_no_more(make: Any) -> None:
    backlog = make()
    old = add_replica(backlog)
    backlog.remove(old)
    new = add_replica(backlog)
    slot = await backlog.acquire()
    backlog.update(old, replica_status(ReplicaState.FAILED))
    backlog.remove(old)
    assert backlog.current_failure() is None
    assert backlog.replicas == {"r1": new}
    assert not slot.lost.done()


# -- draining


async def test_a_draining_replica_gets_no_request_and_goes_with_its_last(make: Any) -> None:
    backlog = make()
    replica = add_replica(backlog, parallel=4)
    one, two = await backlog.acquire(), await backlog.acquire()
    backlog.update(replica, replica_status(ReplicaState.DRAINING, parallel=4))
    waiting = ask(backlog)
    await settle()
    assert not waiting.done()
    one.release()
    assert not replica.link.released
    two.release()
    assert replica.link.released
    assert not waiting.done()
    waiting.cancel()
    backlog.remove(replica)


async def test_an_idle_draining_replica_is_let_go_at_once(make: Any) -> None:
    backlog = make()
    replica = add_replica(backlog)
    backlog.update(replica, replica_status(ReplicaState.DRAINING))
    assert replica.link.released
    assert replica.preempt is None


async def test_after_the_drain_timeout_requests_are_preempted(make: Any) -> None:
    backlog = make(drain_timeout_s=0)
    replica = add_replica(backlog)
    slot = await backlog.acquire()
    backlog.update(replica, replica_status(ReplicaState.DRAINING))
    error = await asyncio.wait_for(slot.lost, 5)
    assert (error.status, error.code) == (503, "preempted")
    assert not replica.link.released  # the request still has to tell its client
    slot.release()
    assert replica.link.released


async def test_a_drain_timeout_that_is_shortened_counts_for_who_drains_already(
    make: Any, clock: Clock
) -> None:
    backlog = make(drain_timeout_s=600)
    replica = add_replica(backlog)
    slot = await backlog.acquire()
    backlog.update(replica, replica_status(ReplicaState.DRAINING))
    clock.now += 30
    backlog.reconfigure(gateway_model(drain_timeout_s=20))
    error = await asyncio.wait_for(slot.lost, 5)
    assert "20 s" in error.message


async def test_a_drain_timeout_that_is_prolonged_counts_for_who_drains_already(
    make: Any, clock: Clock
) -> None:
    backlog = make(drain_timeout_s=0)
    replica = add_replica(backlog)
    slot = await backlog.acquire()
    backlog.update(replica, replica_status(ReplicaState.DRAINING))
    backlog.reconfigure(gateway_model(drain_timeout_s=600))  # before the timer could fire
    await settle()
    assert not slot.lost.done()
    backlog.remove(replica)


async def test_a_replica_that_ends_while_it_drains_leaves_no_timer(make: Any) -> None:
    backlog = make()
    replica = add_replica(backlog)
    await backlog.acquire()
    backlog.update(replica, replica_status(ReplicaState.DRAINING))
    timer = replica.preempt
    assert timer is not None
    backlog.remove(replica)
    assert timer.cancelled()


# -- live changes


async def test_a_higher_limit_admits_who_waits(make: Any) -> None:
    backlog = make()
    add_replica(backlog)
    await backlog.acquire()
    waiting = ask(backlog)
    await settle()
    backlog.reconfigure(gateway_model(max_ongoing_requests=2))
    await asyncio.wait_for(waiting, 5)
    assert backlog.running == 2


async def test_a_lower_limit_waits_for_requests_to_end(make: Any) -> None:
    backlog = make()
    add_replica(backlog, parallel=2)
    one, two = await backlog.acquire(), await backlog.acquire()
    backlog.reconfigure(gateway_model(max_ongoing_requests=1))
    waiting = ask(backlog)
    await settle()
    one.release()
    await settle()
    assert not waiting.done()
    two.release()
    await asyncio.wait_for(waiting, 5)


# -- what is reported


async def test_demand_tells_of_the_queue_and_of_idleness(make: Any, clock: Clock) -> None:
    backlog = make()
    clock.now += 7
    assert backlog.demand().idle_s == pytest.approx(7)
    assert backlog.last_activity_s is None
    waiting = ask(backlog)
    await settle()
    clock.now += 3
    demand = backlog.demand()
    assert (demand.queued, demand.oldest_wait_s, demand.idle_s) == (1, 3, 0)
    add_replica(backlog)
    slot = await waiting
    assert backlog.activation_s == pytest.approx(3)
    assert backlog.demand().running == 1
    slot.release()
    clock.now += 2
    assert backlog.demand().idle_s == pytest.approx(2)
    assert backlog.last_activity_s == pytest.approx(2)


async def test_a_client_that_leaves_the_queue_was_activity(make: Any, clock: Clock) -> None:
    """So the load that it caused goes on, until the idle timeout."""
    backlog = make()
    clock.now += 1000
    waiting = ask(backlog)
    await settle()
    waiting.cancel()
    await settle()
    assert backlog.demand().idle_s == 0


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (None, "starting"),
        (ReplicaState.STARTING, "starting"),
        (ReplicaState.SERVING, "serving"),
        (ReplicaState.FAILED, "failed"),
    ],
)
async def test_the_state_is_that_of_the_best_replica(
    make: Any, state: ReplicaState | None, expected: str
) -> None:
    backlog = make()
    assert backlog.describe()[0] == "zero"
    add_replica(backlog, state)
    assert backlog.describe()[0] == expected


# -- all of it at random


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ("ask", "cancel", "release", "up", "start", "fail", "drain", "gone", "tick")
            ),
            st.integers(0, 3),
        ),
        max_size=40,
    )
)
def test_no_order_of_events_leaks_a_place_or_forgets_a_waiter(
    events: list[tuple[str, int]],
) -> None:
    async def play() -> None:
        clock = Clock()
        backlog = Backlog(gateway_model(max_queued_requests=3, drain_timeout_s=600), clock=clock)
        tasks: list[asyncio.Task[Slot]] = []
        for event, number in events:
            replica = backlog.replicas.get(str(number))
            if event == "ask":
                tasks.append(ask(backlog))
            elif event == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            elif event == "release":
                held = [t.result() for t in tasks if _has_slot(t)]
                if held:
                    held[number % len(held)].release()
            elif event == "tick":
                clock.now += 5
                await settle()
            elif event == "gone" and replica is not None:
                backlog.remove(replica)
            elif event in _STATES:
                if replica is None:
                    replica = add_replica(backlog, None, name=str(number))
                if replica.state is not ReplicaState.DRAINING:
                    backlog.update(replica, replica_status(_STATES[event]))
            for each in backlog.replicas.values():
                assert len(each.running) <= 1
        await settle()
        # Whoever asked has a place, an error or a turn in the queue.
        assert backlog.queued == sum(not task.done() for task in tasks)
        for task in tasks:
            if _has_slot(task):
                task.result().release()
        # One good replica is enough for all who are left.
        add_replica(backlog, name="last")
        for task in tasks:
            if not task.done() or _has_slot(task):
                (await asyncio.wait_for(task, 5)).release()
        assert (backlog.running, backlog.queued) == (0, 0)
        for replica in list(backlog.replicas.values()):
            backlog.remove(replica)
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(play())


_STATES = {
    "up": ReplicaState.SERVING,
    "start": ReplicaState.STARTING,
    "fail": ReplicaState.FAILED,
    "drain": ReplicaState.DRAINING,
}


def _has_slot(task: asyncio.Task[Slot]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def test_watchers_learn_of_every_change(make: Any) -> None:
    backlog = make()
    event = backlog.watch()
    add_replica(backlog)
    await until(event.is_set)
    backlog.unwatch(event)
