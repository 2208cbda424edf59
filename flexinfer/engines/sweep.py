"""Find and end what is left of a start whose launcher can no longer do it.

The launcher cleans up after everything but its own SIGKILL. Two traces lead to what survives that:
the launch id in the environment of every process of a start, and the launcher's session (a process
may overwrite the memory that holds its environment, by changing its title, but not its session).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

from flexinfer.engines.errors import EngineStuck
from flexinfer.engines.launcher import (
    LAUNCH_ID,
    LAUNCHER_MARK,
    descendants,
    environment_of,
    process_table,
)


def find(launch_id: str, *, session: int | None = None) -> list[int]:
    """Return the processes of one start, its launcher included, this process never.

    `session` is the launcher's process id, where it is known.
    """
    table = process_table()
    own = {pid for pid in table if environment_of(pid).get(LAUNCH_ID) == launch_id}
    # The kernel gives a number out again only when its whole session is empty, so members of a
    # leaderless session with this number are ours. A living leader without our id is a stranger.
    if session is not None and (session not in table or session in own):
        own |= {pid for pid, (_, sid) in table.items() if sid == session}
    for pid in tuple(own):
        own.update(descendants(table, pid))
    own.discard(os.getpid())
    return sorted(own)


def sweep(launch_id: str, *, session: int | None = None, timeout_s: float = 5.0) -> list[int]:
    """Kill every process of one start, again and again until none is left; return those killed.

    Blocks (run it in a thread). Raises `EngineStuck` if some are still there after `timeout_s`.
    """
    killed: set[int] = set()
    end = time.monotonic() + timeout_s
    pause = 0.002
    looks = 0  # in a row that found nothing: a process shows no environment while it execs
    while looks < 2:
        left = find(launch_id, session=session)
        looks = 0 if left else looks + 1
        killed.update(left)
        _kill(left)
        if left and time.monotonic() > end:
            raise EngineStuck(left)
        time.sleep(pause)
        pause = min(0.05, pause * 2)
    return sorted(killed)


def orphans() -> dict[str, list[int]]:
    """Return `{launch id: processes}` of the starts on this machine whose launcher is gone."""
    first = _without_launcher()
    if not first:
        return {}
    # A listing of /proc is no snapshot: a launcher and its program that were born during the first
    # one can show the program alone. Both are in the second.
    second = _without_launcher()
    return {launch_id: pids for launch_id, pids in second.items() if launch_id in first}


def sweep_orphans(*, timeout_s: float = 5.0) -> list[int]:
    """End what starts without a living launcher left on this machine; return the processes killed.

    Never ends this process or one of its ancestors. Raises `EngineStuck` as `sweep` does.
    """
    ours = environment_of(os.getpid()).get(LAUNCH_ID)
    killed: list[int] = []
    for launch_id in orphans():
        if launch_id != ours:
            killed += sweep(launch_id, timeout_s=timeout_s)
    return killed


def _without_launcher() -> dict[str, list[int]]:
    members: dict[str, list[int]] = {}
    led: set[str] = set()
    for pid in process_table():
        environment = environment_of(pid)
        launch_id = environment.get(LAUNCH_ID)
        if launch_id is None:
            continue
        if LAUNCHER_MARK in environment:
            led.add(launch_id)
        else:
            members.setdefault(launch_id, []).append(pid)
    return {launch_id: pids for launch_id, pids in members.items() if launch_id not in led}


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # ended, or another user's: the caller's next look tells which
