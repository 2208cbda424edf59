"""The environment that every engine starts from, before its backend and its user add to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from flexinfer.engines.gpus import is_mask

# Secrets belong to us, to Ray and to the hub; an engine needs none of them, and prints its
# environment in more than one kind of crash report. A user who wants one there names it in `env`.
_SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY|PRIVATE_KEY|AUTH)(_|$)"
)
# The rest of what is ours or Ray's: it means nothing to an engine, or something else than to us.
_PRIVATE = re.compile(r"^(FLEXINFER_|RAY_|KUBERNETES_)")
# What Python and OpenMP were told for this process: Ray sets one thread for actors without CPUs.
_PROCESS = frozenset(
    [
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONSTARTUP",
        "VIRTUAL_ENV",
        "OMP_NUM_THREADS",
        "OMP_THREAD_LIMIT",
    ]
)

NO_USAGE_REPORTS: Mapping[str, str] = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value must not be seen."""
    return _SECRET.search(name.upper()) is not None


def add_user_env(
    env: dict[str, str], given: Mapping[str, str], refuse: Callable[[str], str | None]
) -> list[str]:
    """Add the user's variables to `env`, after all others, but for those not theirs to set.

    Those are the masks of GPUs, and whatever `refuse` has a reason against. Returns the reasons.
    """
    reasons = []
    for name, value in given.items():
        mask = f"{name} is set by FlexInfer: Ray assigns the GPUs" if is_mask(name) else None
        reason = mask or refuse(name)
        if reason is None:
            env[name] = value
        else:
            reasons.append(reason)
    return reasons


def base_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what an engine may have of `environ`, with usage reports switched off."""
    kept = {
        name: value
        for name, value in environ.items()
        if not (is_secret(name) or _PRIVATE.match(name) or name in _PROCESS)
    }
    return {**kept, **NO_USAGE_REPORTS}
