"""Where running instances are: one small file each in the user's runtime directory.

A file whose process has ended is stale: it is removed, and so is the working directory it names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_log_path, user_runtime_path

from flexinfer.local.errors import LocalError, NoInstance

RUNTIME_DIR_VARIABLE = "FLEXINFER_RUNTIME_DIR"
LOG_DIR_VARIABLE = "FLEXINFER_LOG_DIR"
URL_VARIABLE = "FLEXINFER_URL"
WORK_PREFIX = "flexinfer-"


@dataclass(frozen=True)
class State:
    """One instance. `start_time` tells its process from a later one with the same number.

    `work_dir` (Ray's and HAProxy's files) and `ports_base` are None where a running cluster was
    joined, and `log_dir` too, since engines run elsewhere then.
    """

    pid: int
    start_time: int
    url: str
    dashboard: str | None = None
    log_dir: str | None = None
    work_dir: str | None = None
    ports_base: int | None = None


def runtime_dir() -> Path:
    """The directory of the state files, made if need be, for this user only.

    Raises `LocalError` if it is somebody else's."""
    named = os.environ.get(RUNTIME_DIR_VARIABLE)
    if named:
        path = Path(named)
    else:
        with warnings.catch_warnings():
            # It warns where no login session has made a directory; the one in /tmp does.
            warnings.simplefilter("ignore")
            path = user_runtime_path("flexinfer", appauthor=False)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    # What stands in a state file is believed, and its working directory is removed in the end.
    if path.stat().st_uid != os.getuid():
        raise LocalError(f"{path} belongs to another user: set {RUNTIME_DIR_VARIABLE}")
    return path


def log_dir(port: int) -> Path:
    """Where engines of an instance on `port` write: FLEXINFER_LOG_DIR, or a place that stays."""
    named = os.environ.get(LOG_DIR_VARIABLE)
    return Path(named).absolute() if named else user_log_path("flexinfer") / str(port)


def make_work_dir() -> Path:
    """A new directory for one instance's own files. Its path is short, because paths of sockets
    that Ray and HAProxy make below it may not be long."""
    base = tempfile.gettempdir()
    if len(base) > len("/var/tmp"):
        base = "/tmp"
    return Path(tempfile.mkdtemp(prefix=WORK_PREFIX, dir=base))


def start_time_of(pid: int) -> int | None:
    """When `pid` started, in the kernel's ticks since boot; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


@contextlib.contextmanager
def registering(directory: Path) -> Iterator[None]:
    """Holds the lock under which instances choose what others must not have."""
    fd = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def save(state: State, directory: Path) -> None:
    """Write or replace the file of `state`, which only this user may read."""
    path = _file(state, directory)
    temporary = path.with_suffix(".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(dataclasses.asdict(state), file, indent=1)
    os.replace(temporary, path)


def remove(state: State, directory: Path) -> None:
    """Remove the file of `state`; safe to call twice."""
    _file(state, directory).unlink(missing_ok=True)


def running(directory: Path) -> list[State]:
    """The instances whose process lives, oldest first. Cleans up after the others."""
    found: list[State] = []
    for path in sorted(directory.glob("*.json")):
        try:
            state = State(**json.loads(path.read_text()))
        except FileNotFoundError:
            continue  # it has ended since the listing
        except (ValueError, TypeError):
            path.unlink(missing_ok=True)  # of another version, or cut by a full disk
            continue
        if start_time_of(state.pid) == state.start_time:
            found.append(state)
        else:
            path.unlink(missing_ok=True)
            remove_work_dir(state.work_dir)
    return sorted(found, key=lambda state: state.start_time)


def remove_work_dir(path: str | Path | None) -> None:
    """Remove an instance's working directory, if it is one."""
    if path is not None and Path(path).name.startswith(WORK_PREFIX):
        shutil.rmtree(path, ignore_errors=True)


def find(url: str | None = None) -> State:
    """The instance to speak to: `url`, else FLEXINFER_URL, else the one that runs.

    For a URL whose instance is not of this user and machine, all but the URL is unknown (pid 0).
    Raises `NoInstance`.
    """
    states = running(runtime_dir())
    url = url or os.environ.get(URL_VARIABLE)
    if url:
        url = (url if "://" in url else f"http://{url}").rstrip("/")
        return next((known for known in states if known.url == url), State(0, 0, url))
    if not states:
        raise NoInstance("no instance is running: start one with `flexinfer up`, or give --url")
    if len(states) > 1:
        urls = ", ".join(state.url for state in states)
        raise NoInstance(f"several instances are running: choose one with --url ({urls})")
    return states[0]


def _file(state: State, directory: Path) -> Path:
    return directory / f"{state.pid}.json"
