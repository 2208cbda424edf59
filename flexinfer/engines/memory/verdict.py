"""Whether a plan fits into what is free, and which setting would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flexinfer.engines.memory.types import Knob, MemoryPlan, MemoryPlanError, Proposal, Verdict

_GIB = 2**30


def gib(count: float) -> str:
    """Bytes for people."""
    return f"{count / _GIB:.1f} GiB"


def judge(plan: MemoryPlan, free: Sequence[int | None], total: int | None) -> Verdict:
    """Compare a plan with the free bytes of each of its GPUs.

    Args:
        plan: what is needed.
        free: free bytes of each GPU in the order of the engine's devices; None where unknown.
        total: the memory of each GPU, for the message; None if unknown.

    Returns:
        A verdict whose proposals are settings with which the plan does fit. The engine's own
        refusal counts whatever is free.
    """
    if plan.gpus == 0:
        return Verdict(None, f"runs on the CPU and needs {gib(plan.needed_bytes)} of RAM")
    free = [*free, *[None] * (len(plan.per_gpu) - len(free))]
    short = _short(plan, free)
    if short is None and plan.refusal is None and plan.doubt is None:
        known = [each for each in free[: len(plan.per_gpu)] if each is not None]
        if len(known) < len(plan.per_gpu):
            return Verdict(None, f"{_needs(plan)}; what is free is not known here")
        return Verdict(True, f"{_needs(plan)}; {gib(min(known))}{_of(total)} is free")
    reason = plan.refusal or f"{_needs(plan)}, and {short}{_of(total)} is free"
    certain = plan.refusal is not None or _short(plan, free, least=True) is not None
    if not certain:
        error = f"{gib(plan.slack_bytes)} of it is the error of the estimate"
        reason = f"too close to tell: {plan.doubt or reason}; {error}"
    proposals = tuple(_proposals(plan, lambda changed: _fits(changed, free), free, total))
    if proposals:
        reason += f"; it would fit with {proposals[0]}"
    elif plan.knobs:
        reason += f"; no value of {_names(plan)} would make it fit"
    return Verdict(False if certain else None, reason, proposals)


def _needs(plan: MemoryPlan) -> str:
    share = plan.fullest
    what = f"weights {gib(share.weights)}, KV cache {gib(share.kv)}, buffers {gib(share.buffers)}"
    each = "a GPU" if len(plan.per_gpu) > 1 else "GPU memory"
    if plan.reserved_bytes is not None and plan.reserved_bytes >= share.total:
        return f"takes {gib(plan.reserved_bytes)} of {each} and needs {gib(share.total)} ({what})"
    return f"needs {gib(share.total)} of {each} ({what})"


def _names(plan: MemoryPlan) -> str:
    names = [knob.field.rpartition(".")[2] for knob in plan.knobs]
    return " or ".join(names)


def _of(total: int | None) -> str:
    return "" if total is None else f" of {gib(total)}"


def _short(plan: MemoryPlan, free: Sequence[int | None], *, least: bool = False) -> str | None:
    """The free memory of the first GPU that has too little, for a message; with `least`, too
    little even for what is needed in any case."""
    for index in range(len(plan.per_gpu)):
        room = free[index] if index < len(free) else None
        if room is not None and plan.claim(index, least=least) > room:
            which = f" on GPU {index}" if len(plan.per_gpu) > 1 else ""
            return f"{gib(room)}{which}"
    return None


def _fits(plan: MemoryPlan, free: Sequence[int | None]) -> bool:
    sound = plan.refusal is None and plan.doubt is None
    return sound and _short(plan, free) is None


Fits = Callable[[MemoryPlan], bool]


def _proposals(
    plan: MemoryPlan, fits: Fits, free: Sequence[int | None], total: int | None
) -> list[Proposal]:
    """Every setting that is enough by itself; if none is, the first pair of settings that is."""
    single = [
        Proposal(((knob.field, knob.render(value)),), changed)
        for knob in plan.knobs
        for value, changed in _best(knob, fits, free, total)
    ]
    if single:
        return single
    for knob in plan.knobs:
        extreme = _extreme(knob, free, total)
        changed = None if extreme is None else _replan(knob, extreme)
        if extreme is None or changed is None:
            continue
        for other in changed.knobs:
            if other.field == knob.field:
                continue
            for value, both in _best(other, fits, free, total):
                settings = (
                    (knob.field, knob.render(extreme)),
                    (other.field, other.render(value)),
                )
                return [Proposal(settings, both)]
    return []


def _replan(knob: Knob, value: int) -> MemoryPlan | None:
    try:
        return knob.replan(value)
    except MemoryPlanError:
        return None


def _best(
    knob: Knob, fits: Fits, free: Sequence[int | None], total: int | None
) -> list[tuple[int, MemoryPlan]]:
    """The value nearest to the one in force with which the plan fits, and that plan; [] if none."""
    if knob.is_share:
        return _best_share(knob, fits)
    low, high = knob.low, knob.high
    found: tuple[int, MemoryPlan] | None = None
    while low <= high:  # less never needs more
        middle = (low + high) // 2
        changed = _replan(knob, middle)
        if changed is not None and fits(changed):
            found, low = (middle, changed), middle + 1
        else:
            high = middle - 1
    if found is None:
        return []
    rounded = found[0] // knob.step * knob.step
    if rounded >= knob.low and rounded != found[0]:
        changed = _replan(knob, rounded)
        if changed is not None and fits(changed):
            return [(rounded, changed)]
    return [found]


def _best_share(knob: Knob, fits: Fits) -> list[tuple[int, MemoryPlan]]:
    values = sorted(
        (value for value in range(knob.low, knob.high + 1) if value != knob.current),
        key=lambda value: (abs(value - knob.current), value),
    )
    for value in values:
        changed = _replan(knob, value)
        if changed is not None and fits(changed):
            return [(value, changed)]
    return []


def _extreme(knob: Knob, free: Sequence[int | None], total: int | None) -> int | None:
    """The value that leaves the most room for other settings."""
    if not knob.is_share:
        return knob.low
    rooms = [room for room in free if room is not None]
    if not rooms or not total:
        return knob.high if rooms or total else None
    value = min(knob.high, min(rooms) * 100 // total)
    return value if value >= knob.low else None
