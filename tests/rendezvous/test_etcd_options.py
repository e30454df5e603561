"""Options and environment variables that say where etcd is and who to be, tried on real servers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from store_lab import BINARY, DEADLINE_S

from unicron_elastic.rendezvous.store.address import StoreAddress, TlsFiles
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.interface import StoreDeniedError, StoreError
from unicron_elastic.rendezvous.store.library import grpc, messages
from unicron_elastic.rendezvous.store.options import address_from_options
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

PASSWORD = "pass word, with = and #"


def _address(
    given: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None, endpoint: str | None = "a:1"
) -> StoreAddress:
    return address_from_options(endpoint, given or {}, environ or {})


def _why_not(given: Mapping[str, str], environ: Mapping[str, str] | None = None, endpoint: str | None = "a:1") -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        _address(given, environ, endpoint)
    return str(caught.value)


# -- against servers ---------------------------------------------------------------------------------------------------


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=DEADLINE_S)


def _certificate(folder: Path, name: str, ca: str | None) -> None:
    key, cert = folder / f"{name}.key", folder / f"{name}.pem"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}")
    if ca is None:
        _openssl("req", "-x509", *curve, "-days", 2, "-keyout", key, "-out", cert)
        return
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text("subjectAltName=IP:127.0.0.1\n")
    _openssl("req", *curve, "-keyout", key, "-out", request)
    signing = ("-CA", folder / f"{ca}.pem", "-CAkey", folder / f"{ca}.key", "-CAcreateserial", "-days", 2)
    _openssl("x509", "-req", "-in", request, *signing, "-extfile", extensions, "-out", cert)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_a_server_that_asks_for_a_certificate(tmp_path: Path) -> None:
    _certificate(tmp_path, "ca", None)
    for name in ("server", "client"):
        _certificate(tmp_path, name, "ca")
    ca, cert, key = (str(tmp_path / name) for name in ("ca.pem", "client.pem", "client.key"))
    files = TlsFiles(ca=Path(ca), cert=tmp_path / "server.pem", key=tmp_path / "server.key")
    with EmbeddedEtcd(tls=files, binary=BINARY) as server:
        where = f"127.0.0.1:{server.port}"
        addresses = (
            address_from_options(where, {"etcd_ca": ca, "etcd_cert": cert, "etcd_key": key}, {}),
            address_from_options(f"https://{where}", {"etcd_ca": ca, "etcd_cert": cert}, {"UNICRON_ETCD_KEY": key}),
            _address(
                environ={
                    "UNICRON_ETCD_ENDPOINT": where,
                    "UNICRON_ETCD_CA": ca,
                    "UNICRON_ETCD_CERT": cert,
                    "UNICRON_ETCD_KEY": key,
                },
                endpoint=None,
            ),
        )
        for number, address in enumerate(addresses):
            with EtcdStore(address) as store:
                store.put("a", b"%d" % number)
                entry = store.read("a").entry
                assert entry is not None
                assert entry.value == b"%d" % number
        with (
            EtcdStore(address_from_options(where, {"etcd_ca": ca}, {}), timeout_s=2.0) as store,
            pytest.raises(StoreError),
        ):
            store.read("a")


def test_a_server_that_asks_for_a_password(server: EmbeddedEtcd, tmp_path: Path) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options=(("grpc.enable_http_proxy", 0),)) as channel:
        auth = messages.AuthStub(channel)
        auth.RoleAdd(messages.AuthRoleAddRequest(name="root"))
        auth.UserAdd(messages.AuthUserAddRequest(name="root", password=PASSWORD))
        auth.UserGrantRole(messages.AuthUserGrantRoleRequest(user="root", role="root"))
        auth.AuthEnable(messages.AuthEnableRequest())
    (good := tmp_path / "good").write_text(PASSWORD + "\n")
    (bad := tmp_path / "bad").write_text("wrong\n")
    from_file = address_from_options(server.endpoint, {"etcd_user": "root", "etcd_password_file": str(good)}, {})
    from_environ = _address({}, {"UNICRON_ETCD_USER": "root", "UNICRON_ETCD_PASSWORD": PASSWORD}, server.endpoint)
    for number, address in enumerate((from_file, from_environ)):
        with EtcdStore(address) as store:
            store.put("a", b"%d" % number)
            assert store.read_prefix("").entries[0].value == b"%d" % number
    address = address_from_options(server.endpoint, {"etcd_user": "root", "etcd_password_file": str(bad)}, {})
    with EtcdStore(address) as store, pytest.raises(StoreDeniedError, match="does not know the user or the password"):
        store.read("a")


# -- where values come from --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "environ", "expected"),
    [
        ("a:1", {"UNICRON_ETCD_ENDPOINT": "b:1", "PET_RDZV_ENDPOINT": "c:1"}, "http://a:1"),
        ("", {"UNICRON_ETCD_ENDPOINT": "b:1,b2:1", "PET_RDZV_ENDPOINT": "c:1"}, "http://b:1,http://b2:1"),
        (None, {"UNICRON_ETCD_ENDPOINT": " ", "PET_RDZV_ENDPOINT": "c:1"}, "http://c:1"),
        (None, {}, "http://localhost:2379"),
    ],
)
def test_the_endpoint_that_counts(endpoint: str | None, environ: dict[str, str], expected: str) -> None:
    assert str(_address({}, environ, endpoint)) == expected


def test_an_option_wins_over_its_variable(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        (tmp_path / name).write_text(name)
    given = {"etcd_user": "ada", "etcd_password_file": str(tmp_path / "mine")}
    environ = {"UNICRON_ETCD_USER": "eve", "UNICRON_ETCD_PASSWORD_FILE": str(tmp_path / "other")}
    found = [_address(given, environ), _address({}, environ), _address(given, {"UNICRON_ETCD_PASSWORD": "third"})]
    assert [(each.user, each.password) for each in found] == [("ada", "mine"), ("eve", "other"), ("ada", "mine")]


def test_options_of_others_and_empty_variables_do_not_count() -> None:
    address = _address({"last_call_timeout": "5", "label": ""}, {"UNICRON_ETCD_CA": "", "UNICRON_ETCD_PASSWORD": ""})
    assert (address.tls, address.user, address.password) == (None, None, None)


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_ETCD_ENDPOINT", "from-here:7")
    assert str(address_from_options(None, {})) == "http://from-here:7"


@pytest.mark.parametrize("text", ["secret", "secret\n", "secret\r\n"])
def test_the_end_of_the_line_is_no_part_of_the_password(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "password").write_bytes(text.encode())
    file.chmod(0o644)
    address = _address({"etcd_user": "ada", "etcd_password_file": str(file)})
    assert address.password == "secret"
    assert "secret" not in repr(address)


def test_a_tilde_is_the_users_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "password").write_text("secret")
    assert _address({"etcd_user": "ada", "etcd_password_file": "~/password"}).password == "secret"


# -- what cannot be right ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "environ", "sentence"),
    [
        (
            {"etcd_user": "ada"},
            {},
            (
                "etcd_user names a user without a password; give etcd_password_file, or set "
                "UNICRON_ETCD_PASSWORD_FILE or UNICRON_ETCD_PASSWORD"
            ),
        ),
        (
            {"etcd_password_file": "/dev/null"},
            {},
            "etcd_password_file is a password without a user; give etcd_user, or set UNICRON_ETCD_USER",
        ),
        (
            {},
            {"UNICRON_ETCD_PASSWORD": "secret"},
            "UNICRON_ETCD_PASSWORD is a password without a user; give etcd_user, or set UNICRON_ETCD_USER",
        ),
        (
            {"etcd_user": "ada"},
            {"UNICRON_ETCD_PASSWORD": "secret", "UNICRON_ETCD_PASSWORD_FILE": "/x"},
            "UNICRON_ETCD_PASSWORD and UNICRON_ETCD_PASSWORD_FILE are both set; set one of them",
        ),
        (
            {"etcd_user": "ada"},
            {"UNICRON_ETCD_PASSWORD": "sec\nret"},
            "UNICRON_ETCD_PASSWORD must not hold line breaks or other unprintable characters",
        ),
        (
            {"etcd_password": "secret"},
            {},
            (
                "etcd_password would show the password to every user of the machine; write it to a file for "
                "etcd_password_file, or set UNICRON_ETCD_PASSWORD"
            ),
        ),
        (
            {"etcd_cacert": "x"},
            {},
            (
                "'etcd_cacert' is no option for etcd; there are etcd_ca, etcd_cert, etcd_key, etcd_user, "
                "etcd_password_file"
            ),
        ),
        ({"etcd_ca": " "}, {}, "etcd_ca is empty; give a value, or leave the option out"),
        ({"etcd_cert": "x"}, {}, "etcd_cert needs etcd_key, too; give it, or set UNICRON_ETCD_KEY"),
        ({}, {"UNICRON_ETCD_KEY": "x"}, "UNICRON_ETCD_KEY needs etcd_cert, too; give it, or set UNICRON_ETCD_CERT"),
        ({"etcd_cert": "x", "etcd_key": "y"}, {}, "etcd_cert needs etcd_ca, too; give it, or set UNICRON_ETCD_CA"),
        ({"etcd_ca": "/nowhere"}, {}, "the CA file /nowhere cannot be read: No such file or directory"),
        (
            {"etcd_ca": "a\x00b"},
            {},
            r"etcd_ca must not hold line breaks or other unprintable characters, as 'a\x00b' does",
        ),
    ],
)
def test_what_cannot_be_right_is_one_sentence(given: dict[str, str], environ: dict[str, str], sentence: str) -> None:
    assert _why_not(given, environ) == sentence


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "{path} cannot be read: No such file or directory"),
        (b"", "{path} is empty; write the password to it, as its only line"),
        (b"\n", "{path} is empty; write the password to it, as its only line"),
        (b"one\ntwo\n", "{path} must hold the password as its only line, in UTF-8"),
        (b"\xff\xfe", "{path} must hold the password as its only line, in UTF-8"),
        (b"x" * 4097, "{path} must hold the password as its only line, in UTF-8"),
    ],
)
def test_password_files_that_hold_none(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "password"
    if content is not None:
        path.write_bytes(content)
    why = _why_not({"etcd_user": "ada", "etcd_password_file": str(path)})
    assert why == f"etcd_password_file: {sentence.format(path=path)}"


def test_a_pipe_for_the_password_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    why = _why_not({"etcd_user": "ada"}, {"UNICRON_ETCD_PASSWORD_FILE": str(path)})
    assert why == f"UNICRON_ETCD_PASSWORD_FILE: {path} is no regular file; give one with the password as its only line"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_password_file_of_somebody_else(tmp_path: Path) -> None:
    (path := tmp_path / "password").write_text("secret")
    path.chmod(0)
    why = _why_not({"etcd_user": "ada", "etcd_password_file": str(path)})
    assert why == f"etcd_password_file: {path} cannot be read: Permission denied"


def test_tls_files_for_an_endpoint_without_tls(tmp_path: Path) -> None:
    why = _why_not({"etcd_ca": str(tmp_path)}, endpoint="http://a:1")
    assert why == "http://a:1 would not use the TLS files that are given; write https://a:1"


def test_an_endpoint_with_tls_needs_a_ca() -> None:
    assert _why_not({}, endpoint="https://a:1").startswith("https://a:1 needs TLS; give the file of the CA")


def test_options_are_named_as_their_reader_knows_them() -> None:
    with pytest.raises(ValueError, match=r"^--etcd-user names a user .*; give --etcd-password-file, or set UNICRON_"):
        address_from_options("a:1", {"etcd_user": "ada"}, {}, spell=lambda name: f"--{name.replace('_', '-')}")


def test_neither_torch_nor_grpc_is_imported() -> None:
    code = "import sys, unicron_elastic.rendezvous.store.options; sys.exit(bool({'torch', 'grpc'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=DEADLINE_S).returncode == 0
