"""MLC-LLM through the whole of `flexinfer up`, by a stand-in that has MLC's habits."""

from __future__ import annotations

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from mlc_model import write_model
from up_process import Up, wait_for

pytestmark = pytest.mark.ray

HI: Any = [{"role": "user", "content": "Say hi."}]


def mlc(name: str, weights: Path, *, fake: dict[str, str] | None = None, **spec: Any) -> Any:
    """A ModelDeployment on mlc-llm. `fake`: variables of the stand-in."""
    block = {**spec.pop("mlcllm", {}), "env": fake or {}}
    return {
        "apiVersion": "ai.flexinfer/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": name},
        "spec": {
            "backend": "mlc-llm",
            "model": str(weights),
            "minReplicas": 0,
            "resources": {"limits": {"amd.com/gpu": "0"}},
            "mlcllm": block,
            **spec,
        },
    }


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mlc") / "Tiny-q4f16_1-MLC")


@pytest.fixture(autouse=True)
def nothing_stays(up: Up) -> Any:
    """After each test no process of an mlc_llm is left, whatever the test did."""
    yield
    wait_for(lambda: not processes(up), lambda: f"nothing is left: {processes(up)}", 30)


def processes(up: Up, *words: str) -> list[psutil.Process]:
    """Every process of the stand-in, children included."""
    found = []
    for process in up.processes():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            line = process.cmdline()
            if any("mlc_llm" in word for word in line) and all(word in line for word in words):
                found.append(process)
    return found


def engine_log(up: Up, name: str) -> str:
    (file,) = Path(up.environ["FLEXINFER_LOG_DIR"]).rglob(f"{name}.log")
    return file.read_text()


def client_of(up: Up) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_the_openai_client_works_unchanged(up: Up, weights: Path) -> None:
    document = mlc("mlc-talker", weights, servedModelName="Tiny MLC")
    with up.serving(document), client_of(up) as client:
        assert {"mlc-talker", "Tiny MLC"} <= {model.id for model in client.models.list()}
        chat = client.chat.completions.create(model="mlc-talker", messages=HI, max_tokens=3)
        assert chat.choices[0].message.content == "t0 t1 t2 "
        assert chat.model == "mlc-talker"
        pieces = list(
            client.chat.completions.create(
                model="Tiny MLC",
                messages=HI,
                max_tokens=4,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert [piece.choices[0].delta.content for piece in pieces[:-1]] == [
            f"t{number} " for number in range(4)
        ]
        assert {piece.model for piece in pieces} == {"Tiny MLC"}
        assert pieces[-1].usage is not None and pieces[-1].usage.completion_tokens == 4
        done = client.completions.create(model="mlc-talker", prompt="One, two,", max_tokens=2)
        assert done.choices[0].text == "t0 t1 "


def test_what_it_does_not_like_is_said_readably(up: Up, weights: Path) -> None:
    overrides = {"contextWindowSize": 32}
    document = mlc("mlc-strict", weights, mlcllm={"overrides": overrides})
    with up.serving(document), client_of(up) as client:

        def refused(**body: Any) -> openai.APIStatusError:
            with pytest.raises(openai.APIStatusError) as error:
                client.chat.completions.create(model="mlc-strict", **body)
            return error.value

        late = refused(messages=[*HI, {"role": "system", "content": "Be brief."}])
        assert late.status_code == 400
        assert isinstance(late.body, dict)
        assert late.body["message"] == (
            "System prompt at position 1 in the message list is invalid."
        )
        long = refused(messages=[{"role": "user", "content": "word " * 33}])
        assert "has 33 tokens in total, larger than the model input length limit 32" in long.message
        form = refused(messages=HI, stream_options={"include_usage": True})
        assert form.status_code == 422
        assert "stream must be set to True" in form.message


def test_requests_of_one_user_do_not_collide(up: Up, weights: Path) -> None:
    document = mlc("mlc-shared", weights, fake={"FAKE_MLC_TOKENS_PER_S": "50"})
    with up.serving(document), client_of(up) as client:

        def ask(_: int) -> str:
            chat = client.chat.completions.create(
                model="mlc-shared", messages=HI, max_tokens=50, user="everybody"
            )
            return chat.id

        ask(0)  # so that those below run at the same time, for a second
        with ThreadPoolExecutor(4) as pool:
            assert len(set(pool.map(ask, range(4)))) == 4


def test_the_new_name_of_the_limit_counts(up: Up, weights: Path) -> None:
    with up.serving(mlc("mlc-limited", weights)), client_of(up) as client:
        chat = client.chat.completions.create(
            model="mlc-limited", messages=HI, max_completion_tokens=3
        )
        assert chat.usage is not None and chat.usage.completion_tokens == 3
        assert chat.choices[0].finish_reason == "length"


def test_a_load_that_fails_says_why_and_does_not_hang(
    up: Up, weights: Path, tmp_path: Path
) -> None:
    damaged = write_model(tmp_path / "damaged")
    (damaged / "params_shard_0.bin").write_bytes(b"")
    hopeless = {
        "mlc-small-gpu": (
            mlc("mlc-small-gpu", weights, fake={"FAKE_MLC_GPU_BYTES": "60000000"}),
            "not enough GPU memory: MLC may use 51.000 MB",
        ),
        "mlc-oom": (
            mlc("mlc-oom", weights, fake={"FAKE_MLC_FAIL": "oom"}),
            "not enough GPU memory (hipMalloc)",
        ),
        "mlc-damaged": (mlc("mlc-damaged", damaged), "params_shard_0.bin"),
        "mlc-no-jit": (mlc("mlc-no-jit", weights, mlcllm={"jitPolicy": "OFF"}), "modelLibPath"),
        "mlc-other": (mlc("mlc-other", tmp_path), "mlc-chat-config.json"),
    }
    # None of them may wait for this deadline, which is longer than the client's patience.
    for document, _ in hopeless.values():
        document["spec"]["coldStartTimeoutSeconds"] = 3600
    with up.serving(*(document for document, _ in hopeless.values())):
        for name, (_, reason) in hopeless.items():
            refused = up.chat(name)
            assert refused.status_code == 503, (name, refused.text)
            assert reason in refused.json()["error"]["message"], name
            assert reason in up.wait_state(name, "failed")["reason"], name
        wait_for(lambda: not processes(up), "no failed engine is left")


def test_a_dead_engine_thread_is_noticed_and_the_engine_replaced(up: Up, weights: Path) -> None:
    health = {"initialDelaySeconds": 0, "periodSeconds": 1, "timeoutSeconds": 2}
    document = mlc(
        "mlc-fragile",
        weights,
        fake={"FAKE_MLC_DIE_AFTER": "10"},
        healthCheck={**health, "failureThreshold": 1},
    )
    with up.serving(document):
        assert up.chat("mlc-fragile").status_code == 200  # 8 tokens
        first = up.engine_pid("mlc-fragile")
        broken = up.chat("mlc-fragile")  # its thread dies under this one, and nobody answers
        assert broken.status_code == 503, broken.text
        assert broken.json()["error"]["code"] == "engine_lost"
        again = up.chat("mlc-fragile")
        assert again.status_code == 200, again.text
        assert up.engine_pid("mlc-fragile") != first
        assert not psutil.pid_exists(first)


def test_compiling_is_paid_once(up: Up, weights: Path) -> None:
    document = mlc(
        "mlc-compiled",
        weights,
        fake={"FAKE_MLC_COMPILE_S": "1"},
        idleTimeoutSeconds=1,
        mlcllm={"overrides": {"maxNumSequence": 3}},
    )
    with up.serving(document):
        assert up.chat("mlc-compiled").status_code == 200
        assert engine_log(up, "mlc-compiled").count("Compiling using commands") == 1
        for round_ in (1, 2):
            up.wait_state("mlc-compiled", "zero")
            wait_for(lambda: not processes(up), "its engine is gone")
            assert up.chat("mlc-compiled").status_code == 200
            log = engine_log(up, "mlc-compiled")
            assert log.count("Compiling using commands") == 1
            assert log.count("Using cached model lib") == round_


@pytest.mark.parametrize("victim", ["engine", "launcher", "replica"])
def test_no_worker_outlives_what_is_killed(up: Up, weights: Path, victim: str) -> None:
    document = mlc(
        "mlc-sharded",
        weights,
        fake={"FAKE_MLC_STUBBORN_WORKERS": "1"},
        resources={"limits": {"amd.com/gpu": "2"}},
        mlcllm={"overrides": {"tensorParallelShards": 2}},
    )
    with up.serving(document):
        assert up.chat("mlc-sharded").status_code == 200
        (worker,) = processes(up, "worker")
        engine = psutil.Process(up.engine_pid("mlc-sharded"))
        assert engine.environ()["HIP_VISIBLE_DEVICES"] == "0,1"
        pids = {
            "engine": engine.pid,
            "launcher": engine.ppid(),
            "replica": up.model("mlc-sharded")["replicas"][0]["pid"],
        }
        os.kill(pids[victim], signal.SIGKILL)
        wait_for(lambda: not worker.is_running(), "its worker is gone", 10)
        assert up.chat("mlc-sharded").status_code == 200
        assert engine.pid != up.engine_pid("mlc-sharded")


def test_a_stream_is_cut_off_where_the_model_has_to_leave(up: Up, weights: Path) -> None:
    document = mlc(
        "mlc-leaving", weights, fake={"FAKE_MLC_TOKENS_PER_S": "20"}, drainTimeoutSeconds=1
    )
    body = {"model": "mlc-leaving", "messages": HI, "max_tokens": 100_000, "stream": True}
    with httpx.Client(timeout=120.0) as client:
        with up.serving(document):
            request = client.build_request("POST", f"{up.url}/v1/chat/completions", json=body)
            response = client.send(request, stream=True)
            lines = response.iter_lines()
            next(line for line in lines if "t0 " in line)
        # `serving` has waited until it was gone, although it waits for its connections itself.
        assert any('"preempted"' in line for line in lines)
        response.close()
