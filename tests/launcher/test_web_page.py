"""The web page in a real browser: what people see, and what those cannot do who choose names and reasons."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from web_browser import WHY_NOT, Browser
from web_lab import HOSTILE, SECRET, Shown, cluster, hostile_cluster

from unicron_elastic.launcher.common.http import LOOPBACK
from unicron_elastic.launcher.export.listen_address import ListenAddress
from unicron_elastic.launcher.export.web.place import CoordinatorPlace
from unicron_elastic.launcher.export.web.server import WebServer
from unicron_elastic.launcher.export.web.sign_in import password

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

SEEN = "return !document.getElementById('cluster').hidden && document.querySelector('#jobs tbody tr')"
REQUESTED = "return performance.getEntriesByType('resource').map((each) => new URL(each.name).origin)"
WIDE = """return [...document.querySelectorAll('body *')]
    .filter((each) => !each.closest('.scroll') && each.getBoundingClientRect().right > innerWidth + 1)
    .map((each) => each.outerHTML.slice(0, 80))"""
PICTURES = os.environ.get("UNICRON_TEST_PICTURES")  # a folder to which what was seen is written


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def server(shown: Shown) -> Iterator[WebServer]:
    opened = WebServer(LOOPBACK, 0, shown)
    yield opened
    opened.close()


@pytest.fixture
def page(browser: Browser, server: WebServer) -> Browser:
    """Signed in."""
    browser.emulate(dark=False, width=1280, height=900)
    browser.open(f"http://{LOOPBACK}:{server.port}/")
    browser.run(
        "return fetch('/sign-out', {method: 'POST', headers: {'Content-Type': 'application/json'}, body: '{}'})"
    )
    browser.open(f"http://{LOOPBACK}:{server.port}/")
    browser.until("return !document.getElementById('sign-in').hidden")
    browser.type("#password", password(SECRET))
    browser.press("#sign-in-form button")
    browser.until(SEEN)
    browser.log()  # that nobody was signed in at first
    return browser


def keep(name: str, picture: bytes) -> None:
    if PICTURES:
        (Path(PICTURES) / name).write_bytes(picture)


def test_a_wrong_password_is_said_and_the_right_one_opens_it(browser: Browser, server: WebServer) -> None:
    browser.open(f"http://{LOOPBACK}:{server.port}/")
    browser.until("return !document.getElementById('sign-in').hidden")
    browser.type("#password", "wrong")
    browser.press("#sign-in-form button")
    browser.until("return document.getElementById('sign-in-error').textContent")
    assert browser.text("#sign-in-error") == "That is not the password of this cluster."
    assert browser.text("#jobs") == ""
    browser.run("document.getElementById('password').value = ''")
    browser.type("#password", password(SECRET))
    browser.press("#sign-in-form button")
    browser.until(SEEN)
    assert browser.run("return document.cookie") == ""  # no script can read it
    assert browser.run("return document.getElementById('password').value") == ""
    browser.press("#sign-out")
    browser.until("return !document.getElementById('sign-in').hidden")
    for gone in ("chat", "n9", "TFLOP/s of"):
        assert gone not in browser.run("return document.body.textContent")


def test_everything_is_shown_and_nothing_is_asked_of_others(page: Browser, server: WebServer) -> None:
    page.until("return document.querySelector('#waf .achieved')")
    verdict = page.text("#verdict")
    assert verdict.startswith("Degraded\n")
    assert "n9 is kept out: GPU 3 fell off the bus (XID 79)." in verdict
    assert page.text("#where") == "etcd1:2379, coordinated by login1"
    rows = page.run("return [...document.querySelectorAll('#jobs tbody tr')].map((row) => row.innerText)")
    for part in ("chat", "training", "3 of 3", "1,842", "2.43", "99 %", "12.7 TFLOP/s", "1 of 100"):
        assert part in rows[0]
    assert "recovers" in rows[1]
    assert "61 %" in rows[1]
    assert "finished" in rows[2]
    assert "7 nodes: 5 working, 1 idle, 1 broken" in page.text("#nodes-count")
    assert "16.1 TFLOP/s" in page.text("#waf-now")
    assert "Job code lost a node" in page.text("#plan")
    assert set(page.run(REQUESTED)) == {f"http://{LOOPBACK}:{server.port}"}
    assert page.log() == []
    keep("web-page-made.png", page.screenshot())


def test_it_is_live(page: Browser, shown: Shown) -> None:
    first = page.run("return document.getElementById('live').textContent")
    assert first.startswith("live, ")
    jobs = (replace(shown.overview.jobs[0], step=1_900_001), *shown.overview.jobs[1:])
    shown.overview = replace(shown.overview, jobs=jobs)
    page.until("return document.getElementById('jobs').innerText.includes('1,900,001')")
    shown.trouble = "etcd cannot be read: no server at etcd1:2379 answers."
    page.until("return document.getElementById('live').textContent.startsWith('as of ')")
    assert page.text("#trouble") == shown.trouble


def test_an_incident_tells_its_story_and_has_an_address(page: Browser) -> None:
    page.press("#incidents tbody tr:nth-child(2) button")
    story = page.until("return document.querySelector('.story')?.innerText")
    for part in ("From the fault to the next step", "until all had met again", "2,700 ms", "14 micro-batches reused",
                 "restart. 1 of 100 restarts used.", "unicron incidents chat@1:1, on n2"):  # fmt: skip
        assert part in story
    long = page.run(
        "return [...document.querySelectorAll('.story .phase')].map((bar) => Number(bar.getAttribute('width')))"
    )
    assert long == sorted(long)
    assert long[3] / long[2] == pytest.approx(2700 / 1150, rel=0.01)
    address = page.run("return location.href")
    assert "#chat%401/n2/1/" in address
    page.run("location.hash = ''")
    page.until("return !document.querySelector('.story')")
    page.run("location.href = arguments[0]", address)
    page.until("return document.querySelector('.story')")


def test_what_does_not_change_stays_in_place(page: Browser, shown: Shown) -> None:
    page.run(
        "window.kept = document.querySelector('#incidents button.row'), window.chip = document.querySelector('.chip')"
    )
    jobs = (replace(shown.overview.jobs[0], step=2_345_678), *shown.overview.jobs[1:])
    shown.overview = replace(shown.overview, jobs=jobs)
    page.until("return document.getElementById('jobs').innerText.includes('2,345,678')")
    assert page.run("return window.kept.isConnected && window.chip.isConnected")


def test_the_filter_and_the_span_are_pressed(page: Browser) -> None:
    page.type("#filter", "CODE")
    page.until("return document.getElementById('nodes-count').textContent.endsWith('; 2 shown')")
    assert page.text("#nodes").split("\n")[0] == "code"
    page.press("[data-span=day]")
    page.until("return performance.getEntriesByType('resource').some((each) => each.name.endsWith('/waf?span=day'))")
    assert page.run("return document.querySelector('[data-span=day]').getAttribute('aria-pressed')") == "true"


def test_a_promise_that_was_a_guess_does_not_flatten_the_rest(page: Browser, shown: Shown) -> None:
    height = "return Math.round(document.querySelector('#waf path.achieved')?.getBBox().height ?? 0)"
    assert "off the scale" not in page.text("#waf")
    usual = page.until(height)
    shown.guessed_flops = 5e17
    page.press("[data-span=day]")
    page.until("return document.getElementById('waf').textContent.includes('off the scale')")
    assert "off the scale: promised 500 PFLOP/s" in page.run("return document.getElementById('waf').textContent")
    assert page.run(height) > usual / 3


def test_names_and_reasons_are_text_whatever_they_hold(page: Browser, shown: Shown) -> None:
    elements = page.run(
        "return document.querySelectorAll('script, img, iframe, object, a, [onload], [onerror]').length"
    )
    shown.overview = hostile_cluster(time.time())
    page.until("return document.getElementById('jobs').textContent.includes(arguments[0])", HOSTILE[0])
    for index in range(len(HOSTILE)):
        page.run("document.querySelectorAll('#incidents button.row')[arguments[0]].click()", index)
        assert page.run("return document.querySelector('.story') !== null")
    for text in (HOSTILE[0], HOSTILE[1], HOSTILE[3]):
        assert page.run("return document.body.textContent.includes(arguments[0])", text)
    for odd in ("\u202e", "\u0007", "x" * 401):
        assert not page.run("return document.body.textContent.includes(arguments[0])", odd)
    page.run("location.hash = arguments[0]", '"><img src=x onerror=window.hacked=6>')
    now = page.run("return document.querySelectorAll('script, img, iframe, object, a, [onload], [onerror]').length")
    assert now == elements
    assert page.run("return window.hacked ?? null") is None
    assert page.run(WIDE) == []
    assert page.run("return document.scrollingElement.scrollWidth <= innerWidth")
    assert page.log() == []
    keep("web-hostile.png", page.screenshot())


def test_a_script_that_got_in_would_not_run(page: Browser) -> None:
    page.run(
        "const bad = document.createElement('div');"
        'bad.innerHTML = \'<img src=x onerror="window.hacked=1"><p style="position: fixed">x</p>\';'
        "document.body.append(bad);"
        "const script = document.createElement('script'); script.textContent = 'window.hacked=2';"
        "document.body.append(script);"
    )
    page.until("return document.querySelector('div > img[onerror]').complete")
    assert page.run("return window.hacked ?? null") is None
    assert any("Content Security Policy" in each for each in page.log())
    page.run("fetch('http://127.0.0.2:1/').catch(() => {})")
    page.until("return true")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_it_fits_every_width(page: Browser, width: int, dark: bool) -> None:
    page.emulate(dark=dark, width=width, height=844)
    page.press("#incidents tbody tr:nth-child(2) button")
    page.until("return document.querySelector('.story') && document.querySelector('#waf .achieved')")
    assert page.run("return innerWidth") == width
    assert page.run("return document.scrollingElement.scrollWidth") == width
    assert page.run(WIDE) == []
    heights = page.run(
        "return [...document.querySelectorAll('button.row, .word')].map((each) => each.getClientRects().length)"
    )
    assert set(heights) == {1}  # times and states stay on one line
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(17, 19, 26)" if dark else "rgb(243, 244, 248)")
    keep(f"web-{width}-{'dark' if dark else 'light'}.png", page.screenshot())


def test_two_thousand_nodes_are_shown_in_part_and_found_by_the_filter(page: Browser, shown: Shown) -> None:
    node = shown.overview.nodes[0]
    many = [
        replace(node, host=f"gpu-{n:04}", node_id=f"gpu-{n:04}/a", rank=n, is_coordinator=False) for n in range(2000)
    ]
    shown.overview = replace(cluster(time.time()), nodes=tuple(many))
    page.until("return document.getElementById('nodes-count').textContent.startsWith('2,000 nodes')")
    assert "… and 1,700 more; the filter finds them." in page.text("#nodes")
    page.type("#filter", "gpu-1999")
    page.until("return document.querySelectorAll('.chip').length === 1")
    assert "gpu-1999" in page.text("#nodes")


def test_who_does_not_coordinate_shows_the_way_and_takes_over(page: Browser, shown: Shown) -> None:
    shown.place = CoordinatorPlace(False, "n7", ListenAddress("n7.example", 9480))
    page.until("return !document.getElementById('elsewhere').hidden")
    assert page.text("#elsewhere-text") == "n7 coordinates the cluster; its page is at http://n7.example:9480/"
    assert page.run("return document.getElementById('elsewhere-link').href") == "http://n7.example:9480/"
    shown.place = CoordinatorPlace(leads=True)
    page.until(SEEN)


def test_a_page_whose_server_is_gone_says_how_old_it_is(page: Browser, server: WebServer) -> None:
    server.close()
    page.until("return !document.getElementById('trouble').hidden")
    assert page.text("#trouble") == "The process that serves this page does not answer. What is shown is old."
    assert page.text("#live").startswith("as of ")
