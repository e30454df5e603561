"""Who waits says who is there, after a moment, and again when others have come or gone."""

from __future__ import annotations

from unicron_elastic.membership.rounds import JobMember, JobView, NotYet, Place, Round, Settings
from unicron_elastic.membership.wait_news import SILENT_S, WaitNews


def _view(hosts: str, number: int = 0) -> JobView:
    members = tuple(JobMember(node_id=f"{host}/1", host=host, waits_for=number + 1) for host in hosts)
    found = Round(number=number, places=tuple(Place(f"{host}/1", host) for host in hosts))
    return JobView(members=members, round=found if number else None)


def _news(least: int, most: int, **more: bool) -> WaitNews:
    return WaitNews(Settings(min_nodes=least, max_nodes=most), 10.0, node_id="a/1", **more)


def test_who_is_there_is_said_after_a_moment_and_when_that_changes() -> None:
    news = _news(3, 3)
    assert news.sentence(_view("a"), 10.0 + SILENT_S / 2) == ""
    assert news.sentence(_view("a"), 12.0) == "1 of 3 nodes are here: a."
    assert news.sentence(_view("a"), 60.0) == ""
    assert news.sentence(_view("ba"), 61.0) == "2 of 3 nodes are here: a, b."
    assert news.sentence(_view("a"), 61.0 + SILENT_S / 2) == ""  # not more often
    assert news.sentence(_view("a"), 61.0 + SILENT_S) == "1 of 3 nodes are here: a."


def test_more_than_enough_may_wait_for_others() -> None:
    assert _news(2, 4).sentence(_view("ab"), 12.0) == "2 of up to 4 nodes are here, which is enough: a, b."
    assert _news(2, 4).sentence(_view("abc"), 12.0) == "3 of up to 4 nodes are here, 2 would be enough: a, b, c."
    assert _news(1, 2).sentence(_view("ab"), 12.0) == ""  # nobody is waited for


def test_many_are_not_all_named() -> None:
    said = _news(30, 30).sentence(_view("abcdefghijklmnopqrst"), 12.0)
    assert said == f"20 of 30 nodes are here: {', '.join('abcdefghijklmnop')} and 4 more."


def test_while_others_train_nothing_is_said() -> None:
    trains = JobMember(node_id="b/1", host="b", waits_for=1)
    waits = JobMember(node_id="a/1", host="a", waits_for=2)
    view = JobView(members=(trains, waits), round=Round(number=1, places=(Place("b/1", "b"),)))
    assert view.training
    assert _news(2, 2).sentence(view, 60.0) == ""


def test_where_all_speak_in_one_place_the_first_says_it() -> None:
    first = _view("ab").waiting[0].node_id
    for node_id in ("a/1", "b/1"):
        news = WaitNews(Settings(min_nodes=3, max_nodes=3), 10.0, node_id=node_id, is_shared=True)
        assert bool(news.sentence(_view("ab"), 12.0)) == (node_id == first)


def test_why_those_who_are_enough_wait_is_said() -> None:
    why = NotYet("No node of round 1 is left to say that it has ended.", 599.6, is_for_safety=True)
    news = _news(1, 3)
    assert news.sentence(_view("ab"), 12.0, why) == (
        "No node of round 1 is left to say that it has ended. So the next round begins in 600 s, with 2 nodes at "
        "present; a shorter --rdzv-conf blind_patience is waited for less."
    )
    assert news.sentence(_view("ab"), 60.0, why) == ""
