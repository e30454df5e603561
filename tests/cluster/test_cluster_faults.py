"""Jobs of several hosts that meet over etcd, and what becomes of them when hosts, networks and etcd fail.

Each test ends with ``Training.end``, which says what must be so whatever has happened: no two generations trained at
the same time, each went on where the one before it was, and the job came to its end by itself on all hosts.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial

import pytest
from hosts import Host, Network
from jobs import Cluster, Etcd, Generation, Step, faults_in, undisturbed_loss

pytestmark = pytest.mark.timeout(300)

SILENCE_S = 3.0  # longer than a lease lives
FLAP_S = 0.2
ASKED_S = 0.3  # longer than the pause between two questions of an agent to the store of the round
ETCD_AWAY_S = 10.0
LAST_CALL_S = 4.0  # more than passes between the first and the last of agents that start together


@pytest.fixture(params=["first", pytest.param("last", marks=pytest.mark.slow)])
def victim(request: pytest.FixtureRequest) -> str:
    """The host that hosts the store of the round, or one that does not. Ranks follow the names."""
    return {"first": "a", "last": "c"}[request.param]


def others(name: str) -> str:
    """The hosts of three that are left without one."""
    return "abc".replace(name, "")


@pytest.mark.slow
def test_a_worker_is_killed(cluster: Callable[..., Cluster], victim: str) -> None:
    """All begin anew, each with the rank it had."""
    job = cluster()
    os.kill(job.first.pid_of(victim), signal.SIGKILL)

    second = job.until_training("abc", after=job.first)

    assert [second.host_of(rank) for rank in range(3)] == ["a", "b", "c"]
    assert job.end("abc")[1:] == [second]


@pytest.mark.slow
def test_an_agent_is_killed(cluster: Callable[..., Cluster], victim: str) -> None:
    """The others go on, and take its successor in."""
    job = cluster()
    job.agents[victim].kill()

    second = job.until_training(others(victim), after=job.first)
    job.replace(victim)
    third = job.until_training("abc", after=second)

    assert job.end("abc") == [job.first, second, third]


def test_a_host_loses_power(cluster: Callable[..., Cluster], victim: str) -> None:
    """Nobody hears the end of a connection; the others go on all the same, and take the host in when it is back."""
    job = cluster()
    job.hosts[victim].power_off()

    second = job.until_training(others(victim), after=job.first)
    job.hosts[victim].power_on()
    job.replace(victim)
    third = job.until_training("abc", after=second)

    assert job.end("abc") == [job.first, second, third]


@pytest.mark.slow
def test_a_host_loses_power_for_good(cluster: Callable[..., Cluster], victim: str) -> None:
    """Nothing of the others waits for it when the job ends."""
    job = cluster()
    job.hosts[victim].power_off()

    second = job.until_training(others(victim), after=job.first)

    assert job.end(others(victim)) == [job.first, second]


def test_a_host_is_cut_off_and_comes_back(cluster: Callable[..., Cluster], victim: str) -> None:
    """Its agent lives on, knows nothing of the others, and joins them by itself when it can."""
    cut_and_restore(cluster(), victim, Host.cut)


@pytest.mark.slow
@pytest.mark.usefixtures("one_way_cut")
@pytest.mark.parametrize("cut", [Host.cut_out, Host.cut_in])
def test_a_link_is_cut_in_one_direction(
    cluster: Callable[..., Cluster], victim: str, cut: Callable[[Host], None]
) -> None:
    """One side still hears the other one, and that must not hold the rest up."""
    cut_and_restore(cluster(), victim, cut)


def cut_and_restore(job: Cluster, victim: str, cut: Callable[[Host], None]) -> None:
    """The others go on without the host, and with it when the link is whole."""
    cut(job.hosts[victim])
    second = job.until_training(others(victim), after=job.first)
    job.hosts[victim].restore()
    third = job.until_training("abc", after=second)
    assert job.end("abc") == [job.first, second, third]


@pytest.mark.slow
def test_a_partition_in_which_the_larger_part_has_etcd(cluster: Callable[..., Cluster], network: Network) -> None:
    """The larger part goes on; the other one waits, and joins when the network is whole."""
    job = cluster()
    network.partition([network.hosts["store"], *job.of("ab")], job.of("c"))

    second = job.until_training("ab", after=job.first)
    network.heal()
    third = job.until_training("abc", after=second)

    assert job.end("abc") == [job.first, second, third]


@pytest.mark.slow
def test_a_partition_in_which_the_smaller_part_has_etcd(cluster: Callable[..., Cluster], network: Network) -> None:
    """Nobody can go on: one part is too small, and the other one may decide nothing; healed, all do."""
    job = cluster()
    network.partition([network.hosts["store"], *job.of("a")], job.of("bc"))

    job.training.until(lambda: job.training.etcd.members().keys() == {"a"}, "the leases of b and c to run out")
    assert job.training.generations() == [job.first]
    network.heal()
    second = job.until_training("abc", after=job.first)

    assert job.end("abc")[-1] == second


@pytest.mark.slow
def test_two_of_four_hosts_lose_power_at_once(cluster: Callable[..., Cluster]) -> None:
    """The two that are left go on."""
    job = cluster(nnodes="2:4", names="abcd")
    for host in job.of("bd"):
        host.cut()
    for host in job.of("bd"):
        host.power_off()

    second = job.until_training("ac", after=job.first)

    assert job.end("ac")[-1] == second


@pytest.mark.slow
def test_etcd_does_not_answer_for_a_while(cluster: Callable[..., Cluster], etcd: Etcd) -> None:
    """All leases run out meanwhile, and the training is not disturbed, neither then nor after it."""
    job = cluster()
    with etcd.stopped():
        time.sleep(ETCD_AWAY_S)
    for agent in job.agents.values():
        agent.until_said("can be seen again")
    job.training.until(lambda: etcd.members().keys() == {"a", "b", "c"}, "all to be members again")
    job.training.until_more_steps(job.first, steps=50)

    assert job.end("abc") == [job.first]


@pytest.mark.slow
def test_etcd_does_not_answer_and_a_worker_is_killed(cluster: Callable[..., Cluster], etcd: Etcd) -> None:
    """All stop, and meet again when etcd is back."""
    job = cluster()
    with etcd.stopped():
        os.kill(job.first.pid_of("b"), signal.SIGKILL)
        time.sleep(ETCD_AWAY_S)
        assert job.training.generations() == [job.first]

    second = job.until_training("abc", after=job.first)

    assert job.end("abc")[-1] == second


@pytest.mark.slow
def test_etcd_is_away_for_longer_than_an_agent_waits_at_its_start(cluster: Callable[..., Cluster], etcd: Etcd) -> None:
    """The limit is for an address that is wrong; a job that has begun waits for its etcd as long as for a round."""
    job = cluster(conf="connect_timeout=2")
    etcd.kill()
    os.kill(job.first.pid_of("b"), signal.SIGKILL)
    time.sleep(2 * SILENCE_S)
    etcd.start()

    second = job.until_training("abc", after=job.first)

    assert job.end("abc")[-1] == second


@pytest.mark.slow
def test_etcd_is_killed_and_started_again(cluster: Callable[..., Cluster], etcd: Etcd) -> None:
    """It has its data, the training is not disturbed, and the next round begins as usual."""
    job = cluster()
    etcd.kill()
    for agent in job.agents.values():
        agent.until_said("cannot be seen")
    etcd.start()
    for agent in job.agents.values():
        agent.until_said("can be seen again")
    job.training.until_more_steps(job.first, steps=50)
    assert job.training.generations() == [job.first]
    os.kill(job.first.pid_of("b"), signal.SIGKILL)

    second = job.until_training("abc", after=job.first)

    assert job.end("abc") == [job.first, second]


@pytest.mark.slow
def test_a_host_flaps(cluster: Callable[..., Cluster], victim: str) -> None:
    """What is short is waited out; what is long is the loss of the host, which comes back each time."""
    job = cluster()
    for _ in range(5):
        job.hosts[victim].cut()
        time.sleep(FLAP_S)
        job.hosts[victim].restore()
        job.training.until_more_steps(job.first)
    assert job.training.generations() == [job.first]

    latest = job.first
    for _ in range(2):
        job.hosts[victim].cut()
        time.sleep(SILENCE_S)
        job.hosts[victim].restore()
        latest = job.until_training("abc", after=latest)

    assert job.end("abc")[-1] == latest


@pytest.mark.slow
def test_a_host_that_joins_costs_no_restart(cluster: Callable[..., Cluster]) -> None:
    """All begin anew with it, which is nobody's fault, whoever is the first to stop for it."""
    job = cluster(nnodes="2:4", conf=f"last_call_timeout={LAST_CALL_S:g}")
    job.agents["d"] = job.start("d")

    second = job.until_training("abcd", after=job.first)

    assert {step.restarts for step in second.steps} == {0}
    assert job.end("abcd") == [job.first, second]


@pytest.mark.slow
def test_a_host_joins_while_another_one_is_lost(cluster: Callable[..., Cluster], etcd: Etcd) -> None:
    """The regroup may begin without the one or with it; in the end all who live train."""
    job = cluster(nnodes="2:4", conf=f"last_call_timeout={LAST_CALL_S:g}")
    job.agents["d"] = job.start("d")
    job.training.until(lambda: "d" in etcd.members(), "d to have joined")
    job.agents["b"].kill()

    latest = job.until_training("acd", after=job.first)

    assert job.end("acd")[-1] == latest


@pytest.mark.slow
def test_a_host_is_lost_while_all_meet_again(cluster: Callable[..., Cluster], victim: str) -> None:
    """A fault on one host, and the loss of another one just when that is being recovered from."""
    job = cluster()
    os.kill(job.first.pid_of("b"), signal.SIGKILL)
    job.training.until(lambda: "Restart 1 of" in job.agents["b"].said, "the restart to begin")
    job.hosts[victim].power_off()

    latest = job.until_training(others(victim), after=job.first)

    assert job.end(others(victim))[-1] == latest


@pytest.mark.slow
def test_a_host_is_lost_that_has_a_place_in_the_next_round(cluster: Callable[..., Cluster], etcd: Etcd) -> None:
    """It is gone before the round begins, and counted on until that is known: the round must not wait for it."""
    job = cluster()
    os.kill(job.agents["a"].process.pid, signal.SIGSTOP)
    os.kill(job.first.pid_of("b"), signal.SIGKILL)
    job.training.until(lambda: {etcd.members().get(name) for name in "bc"} == {2}, "b and c to wait for a")
    job.hosts["c"].power_off()
    os.kill(job.agents["a"].process.pid, signal.SIGCONT)

    latest = job.until_training("ab", after=job.first)

    assert job.end("ab")[-1] == latest


@pytest.mark.slow
def test_a_host_is_lost_before_it_takes_its_place(cluster: Callable[..., Cluster], etcd: Etcd) -> None:
    """It is counted in, and gone before it meets the others in the new round: that round is given up by all."""
    job = cluster(nnodes="2:4", conf=f"last_call_timeout={LAST_CALL_S:g}")
    lease = etcd.add_member("x", waits_for=2)
    job.training.until(lambda: "x" in etcd.round_hosts(), "the round that counts x in")
    etcd.ask("lease", "revoke", lease)

    second = job.until_training("abc", after=job.first)

    assert job.end("abc") == [job.first, second]


@pytest.mark.slow
def test_a_worker_is_killed_when_the_host_of_the_store_has_lost_power(cluster: Callable[..., Cluster]) -> None:
    """What its agent would tell the others through that store must not keep it."""
    job = cluster()
    job.hosts["a"].cut()
    time.sleep(ASKED_S)
    os.kill(job.first.pid_of("c"), signal.SIGKILL)
    job.hosts["a"].power_off()

    second = job.until_training("bc", after=job.first)

    assert job.end("bc") == [job.first, second]


@pytest.mark.slow
def test_a_host_comes_back_whose_worker_does_not_end_at_once(cluster: Callable[..., Cluster]) -> None:
    """Its agent is known to live before it can take part; a round that counts it in must come to be."""
    job = cluster()
    job.hosts["c"].cut()
    second = job.until_training("ab", after=job.first)
    os.kill(job.first.pid_of("c"), signal.SIGSTOP)
    job.hosts["c"].restore()
    time.sleep(SILENCE_S)
    os.kill(job.first.pid_of("c"), signal.SIGCONT)

    third = job.until_training("abc", after=second)

    assert job.end("abc")[-1] == third


@pytest.mark.slow
def test_a_worker_is_killed_on_a_host_that_is_cut_off(cluster: Callable[..., Cluster]) -> None:
    """Its agent waits for etcd as long as for a round: the limit for its start is no limit here."""
    job = cluster(conf="connect_timeout=2")
    job.hosts["c"].cut()
    second = job.until_training("ab", after=job.first)
    os.kill(job.first.pid_of("c"), signal.SIGKILL)
    job.training.until_more_steps(second, steps=200)
    job.hosts["c"].restore()

    third = job.until_training("abc", after=second)

    assert job.end("abc")[-1] == third


@pytest.mark.slow
def test_more_hosts_than_the_job_takes(cluster: Callable[..., Cluster], etcd: Etcd) -> None:
    """One waits, disturbs nobody, and takes the place of the one that is lost."""
    job = cluster()
    job.agents["d"] = job.start("d")
    job.training.until(lambda: "d" in etcd.members(), "d to have joined")
    job.training.until_more_steps(job.first, steps=50)
    assert job.training.generations() == [job.first]
    job.hosts["b"].power_off()

    second = job.until_training("acd", after=job.first)

    assert job.end("acd") == [job.first, second]


@pytest.mark.slow
def test_a_job_ends_while_a_host_waits_for_a_place(cluster: Callable[..., Cluster], etcd: Etcd) -> None:
    """Who waits for a place in a job that ends is told so, and does not wait on."""
    job = cluster()
    waiting = job.start("d")
    job.training.until(lambda: "d" in etcd.members(), "d to have joined")

    assert job.end("abc") == [job.first]
    job.training.until(lambda: waiting.process.poll() is not None, "the end of d")
    assert "is over" in waiting.said


@pytest.mark.usefixtures("netem")
def test_slow_links(cluster: Callable[..., Cluster]) -> None:
    """300 ms each way from one host are no loss of it, and a worker that is killed is recovered from."""
    job = cluster()
    job.hosts["c"].slow(300)
    job.training.until_more_steps(job.first)
    assert job.training.generations() == [job.first]
    os.kill(job.first.pid_of("b"), signal.SIGKILL)

    second = job.until_training("abc", after=job.first)

    assert job.end("abc") == [job.first, second]


@pytest.mark.usefixtures("netem")
def test_lossy_links(cluster: Callable[..., Cluster]) -> None:
    """A fifth of the packets lost: slower, and nothing else; a host that loses power then is still noticed."""
    job = cluster()
    for host in job.of("abc"):
        host.lossy(20)
    job.training.until_more_steps(job.first)
    assert job.training.generations() == [job.first]
    job.hosts["c"].power_off()

    latest = job.until_training("ab", after=job.first)

    assert job.end("ab")[-1] == latest


def trained(name: str, loaded: int, last: int, began: float, factor: float = 1.0) -> Generation:
    """A generation of one rank that has done the steps up to ``last``, one each second."""
    made = Generation(name, began, {"a": loaded})
    for number in range(loaded + 1, last + 1):
        at, loss = began + number - loaded, undisturbed_loss(number) * factor
        made.steps.append(
            Step(host="a", pid=1, rank=0, size=1, restarts=0, number=number, loss=loss, began=at - 0.5, ended=at)
        )
    return made


@pytest.mark.parametrize(
    ("second", "fault"),
    [
        (partial(trained, "2", 10, 14, began=13.0), None),
        (partial(trained, "2", 5, 14, began=13.0), None),  # who was to write the last checkpoint was lost before it did
        (partial(trained, "2", 10, 14, began=11.0), "at the same time"),
        (partial(trained, "2", 15, 16, began=13.0), "goes on from step"),
        (partial(trained, "2", 0, 14, began=13.0), "goes on from step"),
        (partial(trained, "2", 10, 14, began=13.0, factor=1.001), "has the loss"),
    ],
)
def test_what_a_training_may_not_do(second: Callable[[], Generation], fault: str | None) -> None:
    """What these tests rest on finds what is wrong, and nothing else."""
    found = faults_in([trained("1", 0, 12, began=0.0), second()])
    assert (found == []) if fault is None else any(fault in each for each in found), found


def test_steps_that_do_not_follow_one_another() -> None:
    """A step that was left out is found, and a rank that was missing."""
    odd = trained("1", 0, 5, began=0.0)
    del odd.steps[2]
    assert "do not follow" in faults_in([odd])[0]

    alone = trained("1", 0, 5, began=0.0)
    alone.loaded["b"] = 0
    assert "Ranks are missing" in faults_in([alone])[0]
