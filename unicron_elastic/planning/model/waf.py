"""F and G of the Unicron paper (arXiv 2401.00134): what a task is worth on so many nodes, and what getting there costs.

F(t, x)  = w(t) * T(t, x) if x meets the task's minimum, else 0: weighted achieved FLOP/s, WAF.
G(t, x') = F(t, x') * D_running(n') - [x' != x or a node of t was lost] * F(t, x) * D_transition: weighted FLOP until
the next fault. The penalty is what the task earned before and does not earn while it stands still: F of the *old* x.
"""

from __future__ import annotations

import numpy as np

from unicron_elastic.planning.model.tasks import Floats, Ints, Task

# The key of what is no option. All real keys of a situation together are within 2**59 (see ``optimum.VALUE_BITS``), and
# a price times the nodes within 2**60 (see ``prices``): an option loses less than 2**61, and what is impossible more.
IMPOSSIBLE = -(2**62)
MOVES = 2**20  # one unit of the value in a key; less is how many nodes move


def waf_flops(task: Task, nodes: int) -> float:
    """F(t, x) in weighted FLOP/s."""
    return task.weight * task.rate_flops(nodes) if nodes >= task.min_nodes else 0.0


def standstill_s(task: Task, nodes: int) -> float:
    """How long the task gets no further if it gets ``nodes``; 0.0 if it earned nothing or nothing happens to it."""
    if not task.nodes or (nodes == task.nodes and not task.lost_nodes):
        return 0.0
    if nodes == task.nodes:
        return task.transition.replace_s
    if not nodes:
        return task.transition.stopped_s
    return task.transition.grow_s if nodes > task.nodes else task.transition.shrink_s


def penalty_flop(task: Task, nodes: int) -> float:
    """F(t, x) * D_transition in weighted FLOP: what is lost meanwhile."""
    return waf_flops(task, task.nodes) * standstill_s(task, nodes)


def gains(task: Task, most: int, running_s: float, *, is_pin_held: bool) -> Floats:
    """G(t, x') in weighted FLOP for x' from 0 to ``most``: shape (most + 1,), -inf where x' is no option.

    Options are 0 and what the task can run on; of a pinned task only the pin, and 0 too unless ``is_pin_held``.
    """
    units = min(most, task.most_nodes) // task.unit_nodes
    rates = task.rates_flops[: units + 1]
    ends = slice(0, units * task.unit_nodes + 1, task.unit_nodes)
    found = np.full(most + 1, -np.inf)
    found[ends] = np.where(rates > 0.0, task.weight * rates * running_s, -np.inf)
    found[: task.min_nodes] = -np.inf
    found[0] = 0.0
    if task.pinned_nodes is not None:
        found = _only_pin(found, task.pinned_nodes, is_pin_held=is_pin_held)
    return _penalised(task, found)


def _only_pin(found: Floats, pin: int, *, is_pin_held: bool) -> Floats:
    only = np.full_like(found, -np.inf)
    if not is_pin_held:
        only[0] = found[0]
    if pin < len(found):
        only[pin] = found[pin]
    return only


def _penalised(task: Task, found: Floats) -> Floats:
    old = waf_flops(task, task.nodes)
    if not old:
        return found
    cost = task.transition
    found[1 : task.nodes] -= old * cost.shrink_s
    found[task.nodes + 1 :] -= old * cost.grow_s
    found[0] -= old * cost.stopped_s
    if task.lost_nodes and task.nodes < len(found):
        found[task.nodes] -= old * cost.replace_s
    return found


def keys(task: Task, gained: Floats, exponent: int) -> Ints:
    """What is maximised, as integers: sums of them are exact in any order, so that ties are ties for every algorithm.

    A key is V * 2**20 - M. V is G in units of 2**``exponent``, rounded; two more if the task runs, so that none waits
    while nodes are idle, however little it earns; one less if its number of nodes changes, so that nobody moves for
    what rounding adds. M is how many nodes it gets or gives: of equal plans the one that moves fewest is best. Shape as
    ``gained``; ``IMPOSSIBLE`` where x' is no option.
    """
    counts = np.arange(len(gained))
    is_option = gained > -np.inf
    value = np.rint(np.ldexp(np.where(is_option, gained, 0.0), -exponent)).astype(np.int64)
    value += 2 * (counts > 0) - (counts != task.held_nodes)
    return np.where(is_option, value * MOVES - np.abs(counts - task.held_nodes), IMPOSSIBLE)
