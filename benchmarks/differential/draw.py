"""Draws cases at random, each from the seed and its number alone."""

from __future__ import annotations

import random
from typing import Any

from differential.case import Case, Fault
from differential.churn import CHURNS
from differential.features import BLOCKS, HOWS
from differential.parts import OPTIMIZERS, SCHEDULERS
from differential.script import LOOPS, MEANS, SAVE_AT
from differential.verdict import HIDDEN

__all__ = ["FAULTS", "draw"]

PHASES = ("begin", "forward", "between", "reduce", "reduced", "optimized", "evaluation", "epoch", "end")
FAULTS = {
    "none": 14, "one": 22, "raise": 8, "two": 8, "all": 6, "twice": 6, "thrice": 6,
    "join": 10, "join-at-end": 8, "agent-stop": 7, "node-kill": 5, "node-return": 6,
}  # fmt: skip
NODE_FAULTS = ("join", "join-at-end", "agent-stop", "node-kill", "node-return")
ONLY_FLOAT64 = ("lbfgs",)  # flat views of all parameters
AROUND = ("plain", "epochs", "epochs-scheduler", "evaluation", "more")  # loops in which all of that may stand
NODE_PACE_S = 0.025


def draw(seed: int, number: int, *, with_nodes: bool = True) -> Case:
    """Case ``number`` of those of ``seed``."""
    dice = random.Random(f"{seed}:{number}")
    weights = {name: weight for name, weight in FAULTS.items() if with_nodes or name not in NODE_FAULTS}
    kind = dice.choices(list(weights), list(weights.values()))[0]
    is_over_nodes = kind in NODE_FAULTS or (with_nodes and dice.random() < 0.06)
    ranks = _ranks(dice, kind, is_over_nodes=is_over_nodes)
    loop = dice.choice([*LOOPS, "plain", "plain", "epochs", "evaluation"])
    nodes = 0
    if is_over_nodes:
        nodes = 1 if ranks == 1 else 2 if kind not in ("join", "join-at-end") else dice.choice([1, 2])
    steps = dice.randint(24, 36) if is_over_nodes else dice.randint(7, 12)
    values = {
        "ranks": ranks,
        "nodes": nodes,
        "least_nodes": 1,
        "steps": steps,
        "loop": loop,
        "micro_batches": dice.choice([1, 2, 3, 4, 4, 5, 6, 7, 8]),
        "reproducible": dice.random() < 0.6,
        "gate": "begun" if kind == "join-at-end" else dice.choice(["loaded", "loaded", "loaded", ""]),
        "gate_s": round(dice.uniform(0.0, 0.8), 2) if kind == "join-at-end" else 0.0,
        "after_s": dice.choice([0.0, 0.0, 1.0]) if kind == "join-at-end" else 0.0,
        "change_at": dice.randint(2, steps - 2),
        "pace_s": NODE_PACE_S if is_over_nodes else dice.choice([0.0, 0.004]),
    }
    values |= _trained(dice, loop)
    if loop == "number-early" and kind not in ("none", "join-at-end"):  # others are to go on while a newcomer comes
        values |= {"gate": "", "pace_s": 0.0, "between_s": 0.05, "steps": max(steps, 30)}
    if loop == "number-early" or dice.random() < 0.06:
        values |= {"join_patience_s": 0.05, "load_s": 0.3}
    if kind == "all" and dice.random() < 0.6 and loop != "save" and not set(HIDDEN) & set(values["blocks"]):
        values["snapshot_every"] = dice.choice([1, 2, 3])
    if is_over_nodes:
        values["micro_batches"] = max(2, min(4, values["micro_batches"]))
    if kind == "agent-stop":  # it is to be back before the job ends
        values |= {"steps": 60, "change_at": 20, "pace_s": 0.3 / values["micro_batches"]}
    if kind == "two" and loop == "number-early":
        values |= {"ranks": 3, "micro_batches": 6}
    if dice.random() < 0.5:
        values |= _around(dice, kind, values)
    if values["scheduler"] == "plateau":  # its threshold makes whole numbers of what is rounded otherwise
        values["blocks"] = tuple(each for each in values["blocks"] if each not in ("bf16", "fp32"))
    case = Case(**values)
    return Case(**{**values, "faults": _faults(dice, kind, case)})


def _ranks(dice: random.Random, kind: str, *, is_over_nodes: bool) -> int:
    if is_over_nodes:
        return dice.choice([1, 2, 2]) if kind in ("join", "join-at-end") else 2
    if kind in ("two", "thrice"):
        return dice.choice([2, 3])
    return dice.choice([1, 2, 2, 2, 2, 3, 4]) if kind == "none" else dice.choice([2, 2, 2, 3])


def _trained(dice: random.Random, loop: str) -> dict[str, object]:
    """Layers, optimizer and what goes with it."""
    blocks = dice.sample(sorted(BLOCKS), dice.choice([0, 1, 2, 2, 3, 4]))
    optimizer = dice.choice(sorted(OPTIMIZERS))
    hows = [how for how in HOWS if dice.random() < (0.02 if how == "compiled" else 0.1)]
    scaler = dice.choice(["", "", "", "", "", "on", "overflow"])
    if loop == "save":
        blocks = [each for each in blocks if each not in HIDDEN]
    if "sparse" in blocks and optimizer not in (
        "sgd-bare",
        "adagrad",
    ):  # to others a sparse gradient means another step
        blocks.remove("sparse")
    if "sparse" in blocks:
        scaler = ""
    if optimizer in ONLY_FLOAT64:
        blocks = [each for each in blocks if each not in ("bf16", "fp32", "complex", "odd")]
        hows = [each for each in hows if each not in ("freeze", "unfreeze", "groups")]
        scaler = ""
    if "complex" in blocks and (optimizer not in ("sgd", "sgd-bare", "adam", "adamw") or scaler):
        blocks.remove("complex")
    if optimizer in ("adafactor", "muon", "two", "rprop", "adadelta", "asgd", "master"):
        blocks = [each for each in blocks if each != "complex"]
    if optimizer in ("adafactor", "muon"):
        blocks = [each for each in blocks if each not in ("odd", "convolution")]
    if "compiled" in hows:
        blocks = [each for each in blocks if each not in ("checkpointed", "spectral-old", "sparse", "moving-replaced")]
        blocks = [each for each in blocks if not each.startswith(("counter", "spectral", "sometimes"))]
        hows = [each for each in hows if each not in ("freeze", "unfreeze")]
    if "freeze" in hows and "unfreeze" in hows:
        hows.remove("freeze")
    return {
        "blocks": tuple(blocks),
        "hows": tuple(hows),
        "optimizer": optimizer,
        "scheduler": dice.choice(["", "", *SCHEDULERS]) if optimizer != "lbfgs" else "",
        "scaler": scaler,
        "ema": dice.random() < 0.12 and "complex" not in blocks,
    }


def _around(dice: random.Random, kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """What stands around the steps: evaluations and what follows them, weights that are moved, layers that change."""
    if values["loop"] not in AROUND or values["optimizer"] in ONLY_FLOAT64 or "compiled" in values["hows"]:
        return {}
    follows = dice.choice(["", "rate", "plateau", "swap"])
    found: dict[str, Any] = {
        "evaluate": dice.choice(["", "top", "top", "end"]),
        "mean_type": dice.choice(["", *MEANS]),
        "shadow": dice.random() < 0.25,
        "odd_state": dice.random() < 0.25,
        "same_seed": dice.random() < 0.8,
        "perturb": dice.random() < 0.2 and not values["scaler"],
    }
    if found["evaluate"]:
        found |= {"follows": follows}
        if follows == "plateau":
            found["scheduler"] = "plateau"
        elif follows == "swap":
            found["ema"] = "complex" not in values["blocks"]
    if kind == "none" and dice.random() < 0.4:
        found |= {"churn": dice.choice(CHURNS), "blocks": ("batchnorm",), "ema": False, "shadow": False, "follows": ""}
    return found


def _faults(dice: random.Random, kind: str, case: Case) -> tuple[Fault, ...]:
    places = list(case.places)
    last = case.steps - 2
    if kind == "none":
        return ()
    if kind in ("one", "raise"):
        return (
            _inside(dice, "raise" if kind == "raise" else "kill", dice.choice(places), dice.randint(0, last + 1), case),
        )
    if kind == "two" and case.loop == "number-early":  # who comes is dealt work in its first step
        first, second = dice.sample(places, 2)
        return (_inside(dice, "kill", first, 2, case), Fault("kill", second, 3, "joining"))
    if kind == "two":
        return tuple(_inside(dice, "kill", place, dice.randint(0, last), case) for place in dice.sample(places, 2))
    if kind == "all":
        step = dice.randint(SAVE_AT, last)
        phase = _phase(dice, case)
        return tuple(Fault("kill", place, step, phase) for place in places)
    if kind in ("twice", "thrice"):
        place = dice.choice(places)
        steps = sorted(dice.sample(range(1, last + 1), 2 if kind == "twice" else 3))
        return tuple(_inside(dice, "kill", place, step, case) for step in steps)
    return _node_fault(dice, kind, case)


def _node_fault(dice: random.Random, kind: str, case: Case) -> tuple[Fault, ...]:
    new = "abcd"[case.nodes]
    if kind == "join":
        return (Fault("node-join", new, dice.randint(0, 3)),)
    if kind == "join-at-end":
        return (Fault("node-join", new, case.steps - 3),)
    return (Fault(kind, dice.choice("abcd"[: case.nodes]), dice.randint(3, 10)),)


def _inside(dice: random.Random, kind: str, place: str, step: int, case: Case) -> Fault:
    return Fault(kind, place, step, _phase(dice, case), nth=dice.choice([1, 1, 2, 3]))


def _phase(dice: random.Random, case: Case) -> str:
    usual = [*PHASES[:6], *PHASES[1:5]]
    if case.evaluate:
        usual += ["evaluation", "evaluated"] * 3
    if case.perturb:
        usual += ["perturbed"] * 3
    if case.loop in ("evaluation", "epochs"):
        usual += ["evaluation"] * 3
    if case.loop in ("epochs", "epochs-scheduler", "early", "more"):
        usual += ["epoch"] * 3
    if case.loop == "plain":
        usual.append("end")
    return dice.choice(usual)
