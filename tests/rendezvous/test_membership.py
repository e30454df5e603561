"""Who trains together, and under which ranks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.membership.rounds import (
    Formed,
    JobMember,
    JobView,
    NotYet,
    Place,
    Round,
    Settings,
    next_round,
    nodes_waiting,
)

TWO_TO_FOUR = Settings(min_nodes=2, max_nodes=4, last_call_s=30.0)


def members(*hosts: str, waits_for: int = 1) -> tuple[JobMember, ...]:
    return tuple(
        JobMember(node_id=f"{host}/1", host=host, joined=number, waits_for=waits_for)
        for number, host in enumerate(hosts, 1)
    )


def round_of(number: int, *hosts: str) -> Round:
    return Round(number=number, places=tuple(Place(f"{host}/1", host) for host in hosts))


def formed(view: JobView, settings: Settings = TWO_TO_FOUR, enough_for_s: float = 0.0) -> Round:
    found = next_round(view, settings, enough_for_s)
    assert isinstance(found, Formed), found
    return found.round


def hosts(found: Round) -> list[str]:
    return [place.host for place in found.places]


def test_a_full_house_begins_at_once_in_the_order_of_names() -> None:
    view = JobView(members=members("node10", "node9", "b", "a"))
    found = next_round(view, TWO_TO_FOUR, 0.0)
    assert isinstance(found, Formed)
    assert found.reason == "Round 1 begins with 4 nodes."
    assert hosts(found.round) == ["a", "b", "node9", "node10"]


def test_neighbours_in_the_network_get_neighbouring_ranks() -> None:
    racks = {"a": "rack2", "b": "rack10", "c": "rack2", "d": "rack10"}
    view = JobView(members=tuple(replace(each, label=racks[each.host]) for each in members(*"abcd")))
    assert hosts(formed(view)) == ["a", "c", "b", "d"]


def test_the_first_round_waits_for_more_than_the_fewest_but_not_for_ever() -> None:
    view = JobView(members=members("a", "b"))
    found = next_round(view, TWO_TO_FOUR, 12.0)
    assert found == NotYet("2 nodes wait for up to 4.", 18.0)
    assert hosts(formed(view, enough_for_s=30.0)) == ["a", "b"]


def test_too_few_wait_for_ever() -> None:
    found = next_round(JobView(members=members("a")), TWO_TO_FOUR, 0.0)
    assert found == NotYet("1 node waits, and 2 are needed.")
    after = JobView(members=members("a", waits_for=2), round=round_of(1, "a", "b"))
    assert isinstance(next_round(after, TWO_TO_FOUR, 1e9), NotYet)


def test_after_a_loss_the_rest_begins_at_once_and_keeps_its_ranks() -> None:
    before = round_of(1, "a", "b", "c", "d")
    assert hosts(formed(JobView(members=members("a", "c", "d", waits_for=2), round=before))) == ["a", "d", "c"]
    assert hosts(formed(JobView(members=members("a", "b", "c", waits_for=2), round=before))) == ["a", "b", "c"]
    assert hosts(formed(JobView(members=members("c", "d", waits_for=2), round=before))) == ["c", "d"]


def test_as_long_as_some_still_train_nobody_begins_without_them() -> None:
    view = JobView(members=(*members("a", "b", waits_for=2), *members("c")), round=round_of(1, "a", "b", "c"))
    assert next_round(view, TWO_TO_FOUR, 1e9) == NotYet("1 node of round 1 still trains.")
    assert view.lost == (Place("a/1", "a"), Place("b/1", "b"))


def test_a_host_that_returns_gets_its_old_rank_back() -> None:
    back = JobMember(node_id="a/2", host="a", joined=99, waits_for=4)
    view = JobView(members=(*members("b", "c", waits_for=4), back), round=round_of(3, "a", "b", "c"))
    found = formed(view)
    assert (found.number, hosts(found), found.places[0].node_id) == (4, ["a", "b", "c"], "a/2")


def test_two_agents_of_one_host_are_two_nodes() -> None:
    twins = tuple(JobMember(node_id=f"a/{number}", host="a", joined=number) for number in (1, 2))
    first = formed(JobView(members=twins), Settings(min_nodes=2, max_nodes=2))
    assert [place.node_id for place in first.places] == ["a/1", "a/2"]
    anew = (replace(twins[1], waits_for=2), JobMember(node_id="a/3", host="a", joined=7, waits_for=2))
    second = formed(JobView(members=anew, round=first), Settings(min_nodes=2, max_nodes=2))
    assert [place.node_id for place in second.places] == ["a/3", "a/2"]


def test_more_than_fit_wait_and_are_no_reason_for_another_round() -> None:
    settings = Settings(min_nodes=1, max_nodes=2)
    waiting = JobView(members=members("a", "b", "c"))
    found = next_round(waiting, settings, 0.0)
    assert isinstance(found, Formed)
    assert found.reason == "Round 1 begins with 2 nodes; 1 node waits for a place."
    running = replace(waiting, round=found.round)
    assert running.waiting == ()  # c has to notice first that the round began without it
    *training, left_out = waiting.members
    running = replace(running, members=(*training, replace(left_out, waits_for=2)))
    assert [member.host for member in running.waiting] == ["c"]
    assert nodes_waiting(running, settings) == 0
    assert running.lost == ()


def test_who_waits_is_a_reason_for_another_round_if_there_is_room() -> None:
    more = members("c", "d", waits_for=2)
    view = JobView(members=(*members("a", "b"), more[0]), round=round_of(1, "a", "b"))
    assert nodes_waiting(view, TWO_TO_FOUR) == 1
    assert nodes_waiting(JobView(members=(*members("a"), *more), round=round_of(1, "a", "b")), TWO_TO_FOUR) == 2


def test_who_was_blind_while_a_round_began_is_not_taken_for_waiting() -> None:
    # It comes back with what it said before, and its workers still run the round that is over.
    view = JobView(members=members("a", "b"), round=round_of(2, "c", "d"))
    assert view.waiting == view.training == ()


def test_a_round_of_which_nobody_is_left_may_still_train_somewhere() -> None:
    view = JobView(members=members("c", "d", waits_for=4), round=round_of(3, "a", "b"))
    settings = Settings(min_nodes=1, max_nodes=2, blind_patience_s=600.0)
    found = next_round(view, settings, 0.0, 100.0)
    why = "No node of round 3 is left to say that it has ended: it may train, cut off."
    assert found == NotYet(why, 510.0, is_for_safety=True)
    assert isinstance(next_round(view, settings, 0.0, 610.0), Formed)
    assert isinstance(next_round(replace(view, ended=frozenset({"a/1", "b/1"})), settings, 0.0), Formed)
    assert isinstance(next_round(replace(view, ended=frozenset({"a/1"})), settings, 0.0), NotYet)
    one_is_back = replace(view, members=(*view.members, *members("a", waits_for=4)))
    assert isinstance(next_round(one_is_back, settings, 0.0), Formed)


def test_a_target_leaves_spares() -> None:
    settings = Settings(min_nodes=1, max_nodes=3, target_nodes=2)
    found = next_round(JobView(members=members("a", "b", "c")), settings, 0.0)
    assert isinstance(found, Formed)
    assert hosts(found.round) == ["a", "b"]
    view = JobView(members=(*members("a", "b"), *members("c", waits_for=2)), round=found.round)
    assert nodes_waiting(view, settings) == 0
    assert nodes_waiting(replace(view, members=view.members[1:]), settings) == 1
    with pytest.raises(ValueError, match="target_nodes must be 2 to 3, not 4"):
        Settings(min_nodes=2, max_nodes=3, target_nodes=4)


def test_who_had_a_place_keeps_one_before_those_who_came_first() -> None:
    spare = JobMember(node_id="spare/1", host="spare", joined=0)
    view = JobView(members=(spare, *members("a", "b", waits_for=2)), round=round_of(1, "b", "a"))
    assert hosts(formed(view, Settings(min_nodes=1, max_nodes=2))) == ["b", "a"]


def test_a_closed_job_has_no_more_rounds() -> None:
    view = JobView(members=members("a", "b"), closed="The job has ended.")
    assert next_round(view, TWO_TO_FOUR, 1e9) == NotYet("The job has ended.")


@pytest.mark.parametrize(("fewest", "most"), [(0, 1), (2, 1), (-1, 3)])
def test_impossible_numbers_of_nodes_are_refused(fewest: int, most: int) -> None:
    with pytest.raises(ValueError, match=f"not {fewest}:{most}"):
        Settings(min_nodes=fewest, max_nodes=most)


class Cluster:
    """Agents that come, meet, train, fail and go, against a store that has one truth."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        fewest = self.chance.randint(1, 3)
        self.settings = Settings(min_nodes=fewest, max_nodes=fewest + self.chance.randint(0, 3), last_call_s=5.0)
        self.view = JobView()
        self.revision = 0
        self.training: dict[str, int] = {}  # what agents do, whatever the store says: node to round
        self.starts = 0

    def turn(self) -> None:
        self.revision += 1
        self.chance.choice(
            [self.start, self.start, self.meet, self.meet, self.begin, self.fail, self.die, self.expire]
        )()
        self.check()

    def pick(self, nodes: list[JobMember]) -> JobMember | None:
        return self.chance.choice(nodes) if nodes else None

    def put(self, member: JobMember) -> None:
        others = tuple(each for each in self.view.members if each.node_id != member.node_id)
        self.view = replace(self.view, members=(*others, member))

    def start(self) -> None:
        if len(self.view.members) < 6:
            self.starts += 1
            host = f"h{self.chance.randint(1, 6)}"
            self.put(JobMember(node_id=f"{host}/{self.starts}", host=host, joined=self.revision))

    def meet(self) -> None:
        found = next_round(self.view, self.settings, self.chance.choice([0.0, 10.0]))
        if isinstance(found, Formed):
            self.check_round(found.round)
            self.view = replace(self.view, round=found.round)

    def begin(self) -> None:
        """A node hears of its round and trains."""
        for member in self.view.training:
            assert self.view.round is not None
            self.training.setdefault(member.node_id, self.view.round.number)

    def fail(self) -> None:
        """A node's workers stop, and it waits for the next round."""
        member = self.pick([each for each in self.view.members if each.node_id in self.training])
        if member is not None:
            self.put(replace(member, waits_for=self.training.pop(member.node_id) + 1))

    def die(self) -> None:
        """A node is gone at once, workers and all; its lease lives on for a while."""
        member = self.pick(list(self.view.members))
        if member is not None:
            self.training.pop(member.node_id, None)

    def expire(self) -> None:
        """The lease of a node that does not train any more runs out."""
        member = self.pick([each for each in self.view.members if each.node_id not in self.training])
        if member is not None:
            self.view = replace(self.view, members=tuple(each for each in self.view.members if each is not member))

    def check_round(self, found: Round) -> None:
        ids = [place.node_id for place in found.places]
        assert len(set(ids)) == len(ids)
        assert self.settings.min_nodes <= len(ids) <= self.settings.max_nodes
        assert set(ids) <= {member.node_id for member in self.view.members}
        before = self.view.round
        if before is None:
            return
        assert found.number == before.number + 1
        for rank, place in enumerate(before.places):
            if place.node_id in ids and rank < len(ids):
                assert ids[rank] == place.node_id

    def check(self) -> None:
        rounds = set(self.training.values())
        assert len(rounds) <= 1, f"two rounds train at the same time: {self.training}"
        if rounds:
            assert self.view.round is not None
            assert rounds == {self.view.round.number}
        assert nodes_waiting(self.view, self.settings) <= len(self.view.waiting)


@pytest.mark.parametrize("block", range(10))
def test_never_do_two_rounds_train_at_the_same_time(block: int) -> None:
    for seed in range(block * 1000, block * 1000 + 1000):
        cluster = Cluster(seed)
        for turn in range(60):
            try:
                cluster.turn()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, turn {turn}: {error}") from error


NAMES = st.text("ab019-", max_size=4)


@given(st.lists(st.tuples(NAMES, NAMES), max_size=8), st.lists(NAMES, max_size=8))
def test_ranks_do_not_depend_on_the_order_of_what_is_read(found: list[tuple[str, str]], before: list[str]) -> None:
    everybody = [
        JobMember(node_id=str(number), host=host, label=label, joined=number, waits_for=2)
        for number, (host, label) in enumerate(found)
    ]
    past = Round(number=1, places=tuple(Place(f"old{number}", host) for number, host in enumerate(before)))
    settings = Settings(min_nodes=1, max_nodes=8)
    view = JobView(members=tuple(everybody), round=past)
    assert next_round(view, settings, 0.0) == next_round(replace(view, members=tuple(everybody[::-1])), settings, 0.0)


def ranked_one_by_one(before: Round | None, chosen: list[JobMember]) -> list[str]:
    """Rank as the rules say it, with a look through all nodes for each place."""
    left = list(chosen)
    ranks: dict[int, JobMember] = {}
    moved: list[JobMember] = []
    places = () if before is None else before.places
    came: dict[int, JobMember] = {}
    for names in ("node_id", "host"):
        for rank, place in enumerate(places):
            fit = [each for each in left if getattr(each, names) == getattr(place, names)]
            if rank not in came and fit:
                came[rank] = fit[0]
                left.remove(fit[0])
    for rank, member in sorted(came.items()):
        if rank < len(chosen):
            ranks[rank] = member
        else:
            moved.append(member)
    others = iter([*moved, *left])
    return [(ranks[rank] if rank in ranks else next(others)).node_id for rank in range(len(chosen))]


@given(data=st.data(), nodes=st.integers(1, 12), of_before=st.integers(0, 12))
def test_ranks_are_those_of_the_rules(data: st.DataObject, nodes: int, of_before: int) -> None:
    there = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), min_size=nodes, max_size=nodes))
    there = [*dict.fromkeys(there)]
    places = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=of_before, unique=True))
    before = Round(number=1, places=tuple(Place(f"{host}/{start}", f"{host}") for host, start in places))
    waiting = tuple(
        JobMember(node_id=f"{host}/{start}", host=f"{host}", joined=number, waits_for=2)
        for number, (host, start) in enumerate(there, 1)
    )
    last = before if places else None
    settings = Settings(min_nodes=1, max_nodes=data.draw(st.integers(1, 12)))
    view = JobView(members=waiting, round=last, ended=frozenset(place.node_id for place in before.places))
    found = formed(view, settings, 1e9)
    had_place = {place.node_id for place in before.places}
    chosen = sorted(view.waiting, key=lambda each: each.node_id not in had_place)[: settings.most]
    in_order = sorted(chosen, key=lambda each: (int(each.host), each.node_id))
    assert [place.node_id for place in found.places] == ranked_one_by_one(last, in_order)
