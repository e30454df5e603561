"""Every threshold of the detection, with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PacePolicy:
    """When a pace is degraded, a standstill slow, and a standstill a hang. Factors are of the learned step time.

    The two factors 1.1 and 3 are those of the Unicron paper (arXiv 2401.00134), "online statistical monitoring".
    """

    # What is usual.
    window: int = 64  # looks whose step times make up "usual": the median gives way after half of them
    warmup_steps: int = 10  # steps after a start that prove nothing yet: caches, autotuning, first compilations
    warmup_looks: int = 5  # fewer values have no median to speak of
    drift_looks: int = 20  # fewer values have no mean and spread to speak of
    settled_looks: int = 40  # so many without a change make a pace the usual: a change before belongs to the start

    # Degraded.
    degraded_factor: float = 1.1
    alarm_steps: float = 1.2  # whole steps lost beyond half the factor: 1.3x needs 5 steps to lose them, 1.1x 24
    alarm_spreads: float = 15.0  # on a noisy job the alarm needs this many spreads: one false alarm in e^15 looks
    recovery_speed: float = 3.0  # good steps count so much once it is degraded: recovered after about 10 of them
    relearn_s: float = 30.0  # a change that lasts so long, and a whole window, is the new usual

    # Standing still.
    suspect_share: float = 2 / 3  # of the limit: then evidence is gathered, so that it is there at the limit
    hung_factor: float = 3.0
    spreads: float = 10.0  # a step may also take the usual and so many spreads, if that is more
    survived_factor: float = 1.5  # or so many times a standstill that was called a hang and then went on
    survived_s_max: float = 30.0  # but no more: somebody may have stopped a rank for an hour to look at it
    idle_looks: int = 3  # a live job has some rank on a CPU at nearly every instant; three misses are no chance
    idle_share: float = 0.2  # of the standstill must be idle: a long evaluation has idle moments, a hang is one
    verify_s: float = 0.012  # between two looks at a standstill: above Linux's 10 ms clock tick
    stopped_s: float = 10.0  # what a stopped rank (state T) may take where more than a step is allowed
    busy_cpu_share: float = 0.1  # of a core: more than the background threads of an idle worker, less than any work
    idle_tick_s: float = 0.015  # one tick is no work of who was told to hang: some thread was awake when it came
    busy_gpu_share: float = 0.1
    slow_patience_s: float = 180.0  # beyond the limit, for those at work: an evaluation that nobody named
    attended_s: float = 5.0  # after which is told that a person is at work, who knows that, to others
    elsewhere_s: float = 2.0  # beyond the limit, for the other nodes to say where their ranks are
    blind_floor_s: float = 30.0  # least limit if the caller cannot tell who is at work

    # What is allowed where little was learned. Before the first step of all, everything: a script may never make one.
    warmup_s: float = 60.0  # for each step of the warm-up, or...
    warmup_factor: float = 10.0  # ...so many times the slowest step so far
    unseen_phase_s: float = 600.0  # for a phase the worker names for the first time
    phase_floor_s: float = 5.0  # for a phase known to be shorter: what is not a step varies more than steps do

    # Looking.
    look_share: float = 0.3  # of a step between two looks: each step is seen, and who waits for whom
    look_s_max: float = 0.1  # for short steps: about ten looks a second, well under 0.2 % of a core
    look_slack_s: float = 0.05  # for the shortest: the limit and this, which leaves time to verify within 100 ms
    look_s_min: float = 0.01  # never more often
    standing_share: float = 0.1  # of the standstill between two looks at it
    standing_s_max: float = 1.0
    start_look_s: float = 0.25  # before the first step
