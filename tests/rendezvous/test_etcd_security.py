"""Who is let in to etcd: users with passwords, and certificates made for the test."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from store_lab import BINARY, BLIND_AFTER_S, DEADLINE_S, Told

from unicron_elastic.rendezvous.store.address import StoreAddress, TlsFiles
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.interface import (
    Blind,
    Changes,
    Sighted,
    Snapshot,
    StoreDeniedError,
    StoreError,
    StoreUnreachableError,
)
from unicron_elastic.rendezvous.store.library import grpc, messages
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd


def _enable_users(server: EmbeddedEtcd, namespace: str) -> None:
    """``ada`` may use the namespace, ``root`` everything."""
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options=(("grpc.enable_http_proxy", 0),)) as channel:
        auth = messages.AuthStub(channel)
        for user in ("root", "ada"):
            auth.RoleAdd(messages.AuthRoleAddRequest(name=user))
            auth.UserAdd(messages.AuthUserAddRequest(name=user, password=f"{user}'s"))
            auth.UserGrantRole(messages.AuthUserGrantRoleRequest(user=user, role=user))
        allowed = messages.auth__pb2.Permission(
            permType=2, key=f"{namespace}/".encode(), range_end=f"{namespace}0".encode()
        )
        auth.RoleGrantPermission(messages.AuthRoleGrantPermissionRequest(name="ada", perm=allowed))
        auth.AuthEnable(messages.AuthEnableRequest())


def test_users_and_passwords(server: EmbeddedEtcd) -> None:
    def store(user: str | None, password: str | None, namespace: str = "/mine") -> EtcdStore:
        address = StoreAddress.parse(server.endpoint, user=user, password=password)
        return EtcdStore(address, namespace, blind_after_s=BLIND_AFTER_S)

    with store("ada", "ada's") as early:  # a password is no obstacle where none is asked for
        early.put("a", b"1")
        _enable_users(server, "/mine")
        told = Told()
        early.put("b", b"2")
        early.watch(early.read_prefix(""), told)
        assert early.keep_alive(early.grant(5).lease_id)
        early.put("c", b"3")
        told.wait_for(Changes)
        port = server.port
        server.stop()  # forgets all tokens
        told.wait_for(Blind)
        with EmbeddedEtcd(data_dir=server.data_dir, port=port, binary=BINARY):
            told.wait_for(Sighted)
            early.put("d", b"4")
            told.wait(lambda: told.keys == ["c", "d"])
            for user, password, words in (
                ("ada", "wrong", "does not know the user or the password"),
                ("eve", "ada's", "does not know the user or the password"),
                (None, None, "lets nobody in without a user and a password"),
            ):
                with store(user, password) as other, pytest.raises(StoreDeniedError, match=f":{port} {words}$"):
                    other.read("a")
            with store("ada", "ada's", "/other") as other:
                with pytest.raises(StoreDeniedError, match="does not allow this user to use the key"):
                    other.read("a")
                told = Told()
                other.watch(Snapshot.of_nothing(""), told)
                told.wait_for(Blind)


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=DEADLINE_S)


def _certificate(folder: Path, name: str, ca: str | None, host: str = "127.0.0.1") -> None:
    key, cert = folder / f"{name}.key", folder / f"{name}.pem"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", 2)
    if ca is None:
        _openssl("req", "-x509", *curve, "-subj", f"/CN={name}", "-keyout", key, "-out", cert)
        return
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text(f"subjectAltName=IP:{host}\n")
    _openssl("req", *curve[:-2], "-subj", f"/CN={name}", "-keyout", key, "-out", request)
    signing = ("-CA", folder / f"{ca}.pem", "-CAkey", folder / f"{ca}.key", "-CAcreateserial", "-days", 2)
    _openssl("x509", "-req", "-in", request, *signing, "-extfile", extensions, "-out", cert)


def _files(folder: Path, ca: str, name: str | None) -> TlsFiles:
    if name is None:
        return TlsFiles(ca=folder / f"{ca}.pem")
    return TlsFiles(ca=folder / f"{ca}.pem", cert=folder / f"{name}.pem", key=folder / f"{name}.key")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_tls(tmp_path: Path) -> None:
    _certificate(tmp_path, "ca", None)
    _certificate(tmp_path, "stranger", None)
    _certificate(tmp_path, "server", "ca")
    _certificate(tmp_path, "client", "ca")

    def store(port: int, tls: TlsFiles) -> EtcdStore:
        return EtcdStore(StoreAddress.parse(f"https://127.0.0.1:{port}", tls=tls), timeout_s=2.0)

    with EmbeddedEtcd(tls=_files(tmp_path, "ca", "server"), binary=BINARY) as server:
        with store(server.port, _files(tmp_path, "ca", "client")) as good:
            told = Told()
            good.put("a", b"1")
            good.watch(good.read_prefix(""), told)
            good.put("b", b"2")
            told.wait_for(Changes)
        with store(server.port, _files(tmp_path, "stranger", "client")) as other, pytest.raises(StoreError) as caught:
            other.read("a")
        assert str(caught.value).endswith("shows a certificate that the given CA did not sign")
        with store(server.port, _files(tmp_path, "ca", None)) as other, pytest.raises(StoreError):
            other.read("a")
        with (
            EtcdStore(StoreAddress.parse(f"http://127.0.0.1:{server.port}"), timeout_s=2.0) as other,
            pytest.raises(StoreUnreachableError),
        ):
            other.read("a")
    with pytest.raises(ValueError, match="must be a certificate and its own unencrypted key"):
        store(1, TlsFiles(ca=tmp_path / "ca.pem", cert=tmp_path / "client.pem", key=tmp_path / "server.key"))
