"""What is wrong with what came of a case: one sentence each, with a word for its kind in front. None: all is right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from differential.case import Case
from differential.launch import Launched, Log
from differential.reference import Came
from differential.trace import departures

__all__ = ["apart", "judge", "may_be_refused"]

HIDDEN = ("counter-hidden", "moving-hidden", "constant-hidden")
# Relative, of float64; and where a layer is of a narrower type: RMSprop's momentum has come to 3.1e-2 in bf16.
TOLERANCE, NARROW_TOLERANCE = 1e-6, 5e-2
REFUSED_LOOPS = ("zero-grad-inside", "caught-and-left", "caught-backward", "number-early")
ALL_LOST = "NoStateLeft"  # what a newcomer raises when all others were refused
NARROW = {"bf16", "fp32"}
MORE_PROCESSES = 3  # for each fault, that may have been started beside the first ones


def judge(case: Case, launched: Launched, plain: Came, alone: Came | None, restored: Came | None) -> list[str]:
    """Of one launch. ``alone``: in reproducible mode, what a run in one process comes to."""
    found: list[str] = [f"processes: {problem}" for problem in launched.problems]
    if plain.error:
        return [f"harness: plain torch cannot do this: {plain.error}"]
    refusals = [line for log in launched.logs for line in log.of("raised") if line["ours"]]
    if may_be_refused(case) and (refusals or (alone is not None and alone.is_ours)):
        alone = None
        found += _refused(case, launched, refusals)
        if any(code != 0 for codes in launched.codes.values() for code in codes):
            return found
    else:
        found += _processes(case, launched)
        found += [f"refused: {line['type']}: {line['text'].splitlines()[0]}" for line in refusals[:1]]
    if alone is not None:
        found += _alone(case, alone, plain)
    found += _finals(case, launched, plain, alone)
    found += _reports(case, launched, plain, alone)
    found += _numbers(launched)
    is_one_run = case.reproducible or (is_of_one_run(launched) and not _are_all_lost(case))
    found += departures(case, launched, plain, alone, is_one_run=is_one_run)
    if restored is not None:
        found += _restored(case, restored, plain)
    return list(dict.fromkeys(found))


def may_be_refused(case: Case) -> bool:
    """Whether the product may say no, by name, with a sentence."""
    return case.loop in REFUSED_LOOPS


def tolerance(case: Case) -> float:
    """Of what is not computed in the same order. Rprop goes by signs: one that is rounded otherwise is another run."""
    if not NARROW & set(case.blocks):
        return TOLERANCE
    return math.inf if case.optimizer == "rprop" else NARROW_TOLERANCE


# -- the parts of a verdict -------------------------------------------------------------------------------------------


def _refused(case: Case, launched: Launched, refusals: list[dict[str, Any]]) -> Iterator[str]:
    """A process that is refused is lost to the others, who may come to the end without it, or be refused as well."""
    allowed = ("ValueError", "TypeError", "RuntimeError", "WrongUseError", "NotImplementedError", ALL_LOST)
    odd = [line["type"] for line in refusals if line["type"] not in allowed]
    if odd or (refusals and all(line["type"] == ALL_LOST for line in refusals)):
        yield f"refused: with {(odd or [ALL_LOST])[0]}"
    if len(launched.logs) > 6 * case.ranks + len(case.faults):
        yield f"storm: {len(launched.logs)} processes were started for a script that is refused"


def _processes(case: Case, launched: Launched) -> Iterator[str]:
    """Exit codes, how many processes there were, and whether healthy ones were ended."""
    if launched.problems:
        return
    for node, codes in launched.codes.items():
        if any(code != 0 for code in codes) and not _came_too_late(case, node, launched):
            last = launched.err.strip().splitlines()[-1:] or [""]
            yield f"exit code: node {node} ended with {codes[0]}: {last[0][:200]}"
    allowed = case.ranks + MORE_PROCESSES * case.ranks_per_node * len(case.faults)
    if len(launched.logs) > allowed:
        yield f"storm: {len(launched.logs)} processes were started, {allowed} can be explained"
    if not is_anyone_to_stay(case):
        return
    broken = {fault.place for fault in case.faults if not fault.is_inside and fault.kind != "node-join"}
    for log in launched.logs:
        is_struck = bool(log.of("struck")) or log.place[0] in broken
        has_trained = bool(log.of("step"))  # else it came too late, and nobody needed it any more
        if has_trained and not is_struck and not log.of("end"):
            raised = log.of("raised")
            why = f"; it raised {raised[0]['type']}: {raised[0]['text'].splitlines()[0][:160]}" if raised else ""
            yield f"lost work: a healthy process at {log.place} was ended{why}"


def _came_too_late(case: Case, node: str, launched: Launched) -> bool:
    """Whether a node joined a job that had ended, and says so."""
    is_late = any(fault.kind in ("node-join", "node-return") and fault.place == node for fault in case.faults)
    return is_late and "is over: It has ended well" in launched.err


def is_anyone_to_stay(case: Case) -> bool:
    """Whether ranks that are not struck must come through: not if all are, or a peer is missed where all must meet."""
    inside = [fault for fault in case.faults if fault.is_inside]
    if _are_all_lost(case):
        return False
    if any(fault.phase == "end" or (fault.phase, fault.step) == ("begin", 0) for fault in inside):
        return False  # nobody trains any more, or has the state yet
    if case.nodes and any(fault.phase in ("epoch", "evaluation") for fault in inside):
        return False  # between two epochs all begin again, where other nodes take part
    return not (case.loop == "own-collective" and any(fault.kind != "node-join" for fault in case.faults))


def _are_all_lost(case: Case) -> bool:
    return {fault.place for fault in case.faults if fault.is_inside} >= set(case.places)


def _alone(case: Case, alone: Came, plain: Came) -> Iterator[str]:
    if alone.error:
        yield f"alone: a run in one process ends with {alone.error.splitlines()[0][:300]}"
        return
    if difference := apart(alone.final, plain.final, tolerance(case)):
        yield f"alone: a run in one process is not as plain torch: {difference}"


def _finals(case: Case, launched: Launched, plain: Came, alone: Came | None) -> Iterator[str]:
    finals = [(log, _final(launched, log)) for log in launched.logs if log.of("end")]
    if not finals:
        if not launched.problems:
            yield "no end: no process came to the end of the training"
        return
    first, state = finals[0]
    is_one_run = case.reproducible or is_of_one_run(launched)
    for log, other in finals[1:]:
        if difference := apart(other, state, 0.0 if is_one_run else tolerance(case)):
            yield f"ranks differ: {log.place} from {first.place} at the end: {difference}{_since(log, first)}"
    if case.reproducible and alone is not None and not alone.error:
        for log, other in finals:
            if difference := apart(other, alone.final, 0.0):
                since = _first_different(log, alone.digests)
                yield f"not reproducible: {log.place} ends otherwise than a run alone: {difference}{since}"
                break
    for log, other in finals:
        if difference := apart(other, plain.final, tolerance(case)):
            yield f"wrong numbers: {log.place} ends otherwise than plain torch: {difference}"
            break


def is_of_one_run(launched: Launched) -> bool:
    """Whether no place came to the end twice.

    Who is lost behind its last step has all begin again, also those who came to the end: that is another run, of which
    other ranks may have summed other micro-batches.
    """
    places = [log.place for log in launched.logs if log.of("end")]
    return len(set(places)) == len(places)


def _final(launched: Launched, log: Log) -> dict[str, Any]:
    return launched.finals.get((log.place, log.pid), {})


def _since(log: Log, other: Log) -> str:
    known = {line["step"]: line["digest"] for line in other.of("step")}
    return _first_different(log, known)


def _first_different(log: Log, known: dict[int, str]) -> str:
    steps = [line["step"] for line in log.of("step") if known.get(line["step"], line["digest"]) != line["digest"]]
    return f" (since step {min(steps)})" if steps else ""


def _reports(case: Case, launched: Launched, plain: Came, alone: Came | None) -> Iterator[str]:
    allowed = tolerance(case)
    for log in launched.logs:
        for line in log.of("step"):
            wanted = plain.losses.get(line["step"])
            if wanted is None:
                yield f"steps: {log.place} made step {line['step']}, which there is not"
            elif not _is_near(line["loss"], wanted, allowed):
                yield f"wrong loss: of step {line['step']} at {log.place}: {line['loss']:.9g} and not {wanted:.9g}"
                break
            elif alone is not None and line["step"] in alone.losses and line["loss"] != alone.losses[line["step"]]:
                yield f"not reproducible: the loss of step {line['step']} at {log.place}"
                break
        for line in log.of("evaluated"):
            is_told = line.get("partial", False)
            wanted = plain.evaluated.get((line["place"], line["step"]))
            if line["at"] != line["step"]:
                continue  # a replacement that passes an epoch which was over before it came
            if wanted is not None and not is_told and not _is_near(line["value"], wanted, max(allowed, 1e-5)):
                yield (
                    f"wrong report: run.mean after step {line['step']} at {log.place}: {line['value']:.9g} and not "
                    f"{wanted:.9g}, and it does not say that it is partial"
                )
        for line in log.of("summed"):
            if line["value"] != line["wanted"]:
                yield f"wrong sum: the script's own all_reduce after step {line['step']} at {log.place}"


def _numbers(launched: Launched) -> Iterator[str]:
    for log in launched.logs:
        for line in log.of("micro"):
            if line["step"] != line["drawn"]:
                yield (
                    f"wrong data: {log.place} computed micro-batch {line['index']} of step {line['step']} with the "
                    f"data of step {line['drawn']}"
                )
                break


def _restored(case: Case, restored: Came, plain: Came) -> Iterator[str]:
    if restored.error:
        yield f"saves: what was saved cannot be restored: {restored.error.splitlines()[0][:200]}"
        return
    hidden = {f"buffer blocks.{number}-{name}" for number, name in enumerate(case.blocks) if name in HIDDEN}
    wanted = {name: value for name, value in plain.saved.items() if not any(name.startswith(each) for each in hidden)}
    found = {name: value for name, value in restored.saved.items() if name in wanted}
    if difference := apart(found, wanted, tolerance(case)):
        yield f"saves: what is restored is not what was there at that step: {difference}"


# -- comparing --------------------------------------------------------------------------------------------------------


def apart(one: dict[str, Any], other: dict[str, Any], allowed: float) -> str:
    """The difference that is largest, in words; empty if there is none. ``allowed`` 0: bit by bit."""
    names = [name for name in {**one, **other} if (name in one) != (name in other)]
    if names:
        return f"only one of them has {sorted(names)[0]}"
    worst, text = 0.0, ""
    for name, value in one.items():
        how_far, said = _value_apart(value, other[name], allowed)
        if how_far > worst:
            worst, text = how_far, f"{name}: {said}"
    return text


def _value_apart(one: Any, other: Any, allowed: float) -> tuple[float, str]:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return math.inf, f"{one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
        if allowed == 0.0 or not (one.is_floating_point() or one.is_complex()):
            is_same = torch.equal(_bits(one), _bits(other))
            return (0.0, "") if is_same else (_distance(one, other) or 1e-300, _shown(one, other))
        how_far = _distance(one, other)
        return (how_far, _shown(one, other)) if not how_far <= allowed else (0.0, "")
    if isinstance(one, float) and isinstance(other, float) and allowed:
        return (0.0, "") if _is_near(one, other, allowed) else (abs(one - other), f"{one!r} and {other!r}")
    return (0.0, "") if repr(one) == repr(other) else (1.0, f"{one!r} and {other!r}")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def _distance(one: Tensor, other: Tensor) -> float:
    if not one.numel():
        return 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    first, second = one.to(wide), other.to(wide)
    if torch.equal(torch.isfinite(first), torch.isfinite(second)):
        first, second = torch.nan_to_num(first), torch.nan_to_num(second)
    scale = max(1e-2, float(second.abs().max()))
    return float((first - second).abs().max()) / scale


def _shown(one: Tensor, other: Tensor) -> str:
    if one.numel() == 1:
        return f"{one.item()!r} and {other.item()!r}"
    return f"{_distance(one, other):.1e} apart"


def _is_near(one: float, other: float, allowed: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or abs(one - other) <= allowed * max(1e-2, abs(other))
