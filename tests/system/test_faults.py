"""What breaks, breaks alone: a reason that a user sees, no process left, the others serve on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from up_process import MODEL_FILE, Up, manifest, wait_for

from flexinfer.cache import demo_directory

pytestmark = [pytest.mark.ray, pytest.mark.llama]

LONG = {"stream": True, "max_tokens": 100_000}


class Stream:
    """A streaming request in a thread of its own."""

    def __init__(self, up: Up, name: str, **more: Any) -> None:
        self._up, self._name, self._more = up, name, {**LONG, **more}
        self.status: int | None = None
        self.text = ""
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body = {
            "model": self._name,
            "messages": [{"role": "user", "content": "Count."}],
            **self._more,
        }
        with httpx.Client(timeout=120.0) as client:
            url = f"{self._up.url}/v1/chat/completions"
            with client.stream("POST", url, json=body) as response:
                self.status = response.status_code
                for piece in response.iter_text():
                    self.text += piece
                    if self._leave.is_set():
                        return

    def wait_text(self, text: str) -> None:
        wait_for(lambda: text in self.text, lambda: f"the stream has {text!r}: {self.text[-500:]}")

    def leave(self) -> None:
        self._leave.set()
        self._thread.join(30)

    def end(self) -> str:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the stream goes on"
        return self.text


def last_error(text: str) -> dict[str, Any]:
    last = [line[6:] for line in text.splitlines() if line.startswith("data: ")][-1]
    error: dict[str, Any] = json.loads(last)["error"]
    return error


# -- models that cannot start


def truncated(folder: Path) -> Path:
    """A GGUF that was cut in the middle of its tensors."""
    demo = demo_directory()
    assert demo is not None
    whole = demo / MODEL_FILE
    cut = folder / "cut.gguf"
    with whole.open("rb") as source:
        cut.write_bytes(source.read(20 << 20))
    return cut


def test_a_model_that_cannot_start_fails_with_its_reason_and_others_serve_on(
    up: Up, tmp_path: Path
) -> None:
    hopeless = {
        "too-big": (
            manifest("too-big", fake={}, resources={"limits": {"amd.com/gpu": "9"}}),
            "9 GPU",
        ),
        "missing": (manifest("missing", model="/nowhere/model.gguf"), "/nowhere/model.gguf"),
        "cut": (manifest("cut", model=str(truncated(tmp_path))), "incomplete"),
        "quits": (manifest("quits", fake={"FAKE_EXIT_LOADING": "3"}), "3"),
        "hangs": (
            manifest("hangs", fake={"FAKE_HANG_LOADING": "503"}, coldStartTimeoutSeconds=2),
            "2 s",
        ),
    }
    with up.serving(manifest("healthy"), *(document for document, _ in hopeless.values())):
        for name, (_, reason) in hopeless.items():
            refused = up.chat(name)
            assert refused.status_code == 503, (name, refused.text)
            assert reason in refused.json()["error"]["message"], name
            model = up.wait_state(name, "failed")
            assert reason in model["reason"], name
        assert up.chat("healthy").status_code == 200
        up.wait_no_engine("quits")
        up.wait_no_engine("hangs")


# -- engines and replicas that end


def kill_engine(up: Up, name: str) -> None:
    os.kill(up.engine_pid(name), signal.SIGKILL)


def kill_launcher(up: Up, name: str) -> None:
    os.kill(psutil.Process(up.engine_pid(name)).ppid(), signal.SIGKILL)


def kill_replica(up: Up, name: str) -> None:
    os.kill(up.model(name)["replicas"][0]["pid"], signal.SIGKILL)


def wait_gone(pid: int) -> None:
    wait_for(lambda: not psutil.pid_exists(pid), f"process {pid} is gone", 10)


@pytest.mark.parametrize("kill", [kill_engine, kill_launcher, kill_replica])
def test_a_stream_ends_with_an_error_when_its_engine_is_killed(up: Up, kill: Any) -> None:
    with up.serving(manifest("victim", fake={})):
        stream = Stream(up, "victim")
        stream.wait_text("content")
        first = up.engine_pid("victim")
        kill(up, "victim")
        error = last_error(stream.end())
        assert error["code"] == "engine_lost"
        again = up.chat("victim")
        assert again.status_code == 200, again.text
        assert up.engine_pid("victim") != first
        wait_gone(first)


def test_no_engine_outlives_a_replica_that_ray_kills(up: Up) -> None:
    with up.serving(manifest("killed", fake={})):
        for way in ("ray.kill(actor)", "exit"):
            assert up.chat("killed").status_code == 200
            engine = up.engine_pid("killed")
            run_in_cluster(up, way, up.model("killed")["replicas"][0]["id"])
            wait_gone(engine)


def run_in_cluster(up: Up, way: str, replica_id: str) -> None:
    """End a replica's actor from a driver of its own: by force, or from within."""
    environ, address = up.ray_driver()
    script = f"""
import ray
ray.init(address={address!r}, logging_level="ERROR")
names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True)]
name = next(n for n in names if {replica_id!r} in n)
actor = ray.get_actor(name, namespace="serve")
if {way!r} == "exit":
    def leave(self):
        ray.actor.exit_actor()
    try:
        ray.get(actor.__ray_call__.remote(leave))
    except ray.exceptions.RayActorError:
        pass
else:
    ray.kill(actor)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_removed_model_ends_although_it_is_loading(up: Up) -> None:
    with up.serving(manifest("loading", fake={"FAKE_LOAD_S": "100"})):
        stream = Stream(up, "loading")
        up.wait_state("loading", "starting")
        wait_for(lambda: up.engines("loading"), "its engine is loading")
    # `serving` has waited until nothing of it is left
    assert last_error(json_as_event(stream.end()))["code"] == "model_not_found"


def json_as_event(text: str) -> str:
    return text if "data: " in text else f"data: {text}"


# -- clients that leave


def test_a_client_that_leaves_gives_its_place_back(up: Up) -> None:
    document = manifest("one-place", fake={}, maxOngoingRequests=1)
    with up.serving(document):
        up.chat("one-place")
        running = Stream(up, "one-place")
        running.wait_text("content")
        waiting = Stream(up, "one-place")
        wait_for(lambda: up.model("one-place")["queued"] == 1, "one waits")
        other = Stream(up, "one-place")
        wait_for(lambda: up.model("one-place")["queued"] == 2, "two wait")

        running.leave()  # in its stream: the next one gets the place
        waiting.wait_text("content")
        wait_for(lambda: up.model("one-place")["queued"] == 1, "one waits")
        waiting.leave()
        other.wait_text("content")
        other.leave()
        wait_for(lambda: up.model("one-place")["running"] == 0, "none runs")
        assert up.chat("one-place").status_code == 200


def test_a_client_that_leaves_its_queue_or_a_cold_start_is_forgotten(up: Up) -> None:
    with up.serving(manifest("slow", fake={"FAKE_LOAD_S": "4"}, maxQueuedRequests=1)):
        with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=1.0) as hasty:
            hasty.post(f"{up.url}/v1/completions", json={"model": "slow", "prompt": "a"})
        wait_for(lambda: up.model("slow")["queued"] == 0, "nobody waits")
        answer = up.chat("slow")  # the load went on, and the place in the queue is free
        assert answer.status_code == 200, answer.text


# -- the queue


def test_a_full_queue_is_said_at_once(up: Up) -> None:
    def document(queue: int) -> dict[str, Any]:
        return manifest(
            "full",
            fake={},
            maxOngoingRequests=1,
            maxQueuedRequests=queue,
            aliases=[f"queue-{queue}"],
            drainTimeoutSeconds=1,
        )

    def change(queue: int) -> None:
        up.write(document(queue))
        wait_for(lambda: f"queue-{queue}" in up.model("full")["names"], "the change is there")

    with (
        up.serving(document(0)),
        openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.InternalServerError) as cold:
            client.completions.create(model="full", prompt="a", max_tokens=1)
        assert cold.value.status_code == 503  # nobody may wait, not even for the start
        change(1)
        assert up.chat("full").status_code == 200
        stream = Stream(up, "full")
        stream.wait_text("content")
        change(0)
        answer = up.chat("full")
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="full", prompt="a", max_tokens=1)
    # The model was removed under the stream, which had its second to finish.
    assert last_error(stream.end())["code"] == "preempted"
