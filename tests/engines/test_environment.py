"""What an engine inherits."""

from __future__ import annotations

import pytest

from flexinfer.engines.environment import base_env, is_secret


@pytest.mark.parametrize(
    "name",
    [
        "FLEXINFER_API_KEY",
        "FLEXINFER_LLAMA_CPP",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "RAY_AUTH_TOKEN",
        "RAY_ADDRESS",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "OPENAI_API_KEY",
        "DB_PASSWORD",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "OMP_NUM_THREADS",
        "PYTHONPATH",
    ],
)
def test_left_out(name: str) -> None:
    assert name not in base_env({name: "value"})


@pytest.mark.parametrize(
    "name", ["PATH", "HOME", "LD_LIBRARY_PATH", "TOKENIZERS_PARALLELISM", "LANG", "HSA_ENABLE_SDMA"]
)
def test_kept(name: str) -> None:
    assert base_env({name: "value"})[name] == "value"


def test_usage_reports_are_off() -> None:
    env = base_env({"DO_NOT_TRACK": "0", "VLLM_NO_USAGE_STATS": "0"})
    assert env["DO_NOT_TRACK"] == env["VLLM_NO_USAGE_STATS"] == "1"


def test_secrets_by_their_names() -> None:
    assert is_secret("my_api_key")
    assert is_secret("NPM_TOKEN")
    assert not is_secret("TOKENIZERS_PARALLELISM")
    assert not is_secret("MAX_TOKENS_PER_STEP")
