"""Where etcd is: what is understood, and what is said of what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron_elastic.rendezvous.store.address import StoreAddress, TlsFiles
from unicron_elastic.rendezvous.store.own_address import address_of_this_host, address_towards, own_address


def test_endpoints_are_understood() -> None:
    address = StoreAddress.parse("http://10.0.0.1:2379, etcd-2:2380,http://[::1]:1,http://10.0.0.1:2379,http://host")
    assert [str(each) for each in address.endpoints] == [
        "http://10.0.0.1:2379",
        "http://etcd-2:2380",
        "http://[::1]:1",
        "http://host:2379",
    ]
    assert address.endpoints[2].target == "[::1]:1"


def test_a_host_whose_names_can_be_none_is_found_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda: "node1..cluster")
    monkeypatch.setattr(
        "unicron_elastic.rendezvous.store.own_address.address_towards",
        lambda host, _port: "10.1.2.3" if host == "etcd1" else address_towards("a..b", 1),
    )
    assert own_address(StoreAddress.parse("a..b:1,etcd1:2379")) == "10.1.2.3"


def test_a_host_whose_name_does_not_resolve_is_found_by_the_loopback_if_nobody_else_looks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda: "no-such-host.invalid")
    assert address_of_this_host() == "127.0.0.1"
    assert own_address(StoreAddress.parse("127.0.0.1:2379")) == "127.0.0.1"


def test_a_host_whose_name_resolves_goes_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda: "localhost")
    assert address_of_this_host() == "localhost"


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "ftp://a:1",
        "http://",
        "http://a:port",
        "http://a:0",
        "http://a:99999",
        "http://u:p@a:1",
        "http://a:1/x?y",
        "http://a b:1",
        "http://[::1:1",
    ],
)
def test_what_is_no_endpoint_is_said(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no etcd endpoint; give http://HOST:PORT"):
        StoreAddress.parse(text)


def test_at_least_one_is_needed() -> None:
    with pytest.raises(ValueError, match="no etcd endpoint is given"):
        StoreAddress.parse([])


def test_a_password_needs_a_user_and_is_not_shown() -> None:
    with pytest.raises(ValueError, match="user and its password go together"):
        StoreAddress.parse("a:1", password="secret")
    assert "secret" not in repr(StoreAddress.parse("a:1", user="ada", password="secret"))


def test_tls_needs_its_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="https://a:1 needs TLS; give the file of the CA"):
        StoreAddress.parse("https://a:1")
    missing, junk = tmp_path / "missing.pem", tmp_path / "junk.pem"
    junk.write_text("junk")
    with pytest.raises(ValueError, match=r"http://a:1 would not use the TLS files that are given; write https://a:1"):
        StoreAddress.parse("http://a:1", tls=TlsFiles(ca=junk))
    with pytest.raises(ValueError, match=r"the CA file .*missing.pem cannot be read: No such file"):
        StoreAddress.parse("https://a:1", tls=TlsFiles(ca=missing))
    with pytest.raises(ValueError, match=r"junk.pem holds no certificate in PEM form"):
        StoreAddress.parse("a:1", tls=TlsFiles(ca=junk))
    with pytest.raises(ValueError, match="go together"):
        StoreAddress.parse("a:1", tls=TlsFiles(ca=junk, cert=junk))
