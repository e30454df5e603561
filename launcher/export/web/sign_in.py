"""Who may see the web page: its password, which the cluster's secret gives, sessions, and the limit on guessing. Pure.

The password is made from the secret and does not give it away: whoever gets hold of it sees the page and can do nothing
more. Sessions are signed instead of kept, so that a page that is served from elsewhere on the same host knows them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict

SESSION_S = 12 * 3600
GUESSES_MOST = 10  # wrong passwords of one address, at once
GUESS_AGAIN_S = 6.0  # for each more
ADDRESSES_MOST = 1024  # that are remembered, the latest
_TEXT_CHARACTERS = 200


def password(secret: str) -> str:
    """What lets people see the page: 32 hexadecimal digits. Raises ValueError if there is no secret."""
    return _derived(secret, "web password")[:32]


def is_password(secret: str, text: str) -> bool:
    """Whether ``text`` is it, blanks around it aside. Takes the same time for all texts of a length."""
    return _is_same(password(secret), text.strip())


def cookie_name(secret: str) -> str:
    """Another one for each cluster: a browser may see several through tunnels, all of them at localhost."""
    return f"unicron_{_derived(secret, 'web cookie')[:8]}"


def new_session(secret: str, now_unix_s: float) -> str:
    """What a browser keeps, for ``SESSION_S`` seconds."""
    told = f"{int(now_unix_s) + SESSION_S}.{secrets.token_hex(8)}"
    return f"{told}.{_derived(secret, 'web session', told)}"


def is_session(secret: str, text: str, now_unix_s: float) -> bool:
    """Whether ``text`` came from ``new_session`` and still counts."""
    told, _, proof = text[:_TEXT_CHARACTERS].rpartition(".")
    if not _is_same(_derived(secret, "web session", told), proof):
        return False
    return int(told.partition(".")[0]) > now_unix_s  # a number: it is proven that it was made above


class Guesses:
    """How many wrong passwords came from each address. Time is monotonic seconds; for one thread at a time."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, tuple[float, float]] = OrderedDict()  # how many are left, and as of when

    def wait_s(self, address: str, now_s: float) -> float:
        """Seconds until an address may try again; 0: now."""
        return max(0.0, (1.0 - self._left(address, now_s)) * GUESS_AGAIN_S)

    def was_wrong(self, address: str, now_s: float) -> None:
        """Counts a wrong one."""
        left = self._left(address, now_s)
        self._of.pop(address, None)
        while len(self._of) >= ADDRESSES_MOST:
            self._of.popitem(last=False)
        self._of[address] = left - 1.0, now_s

    def _left(self, address: str, now_s: float) -> float:
        left, since_s = self._of.get(address, (float(GUESSES_MOST), now_s))
        return min(float(GUESSES_MOST), left + (now_s - since_s) / GUESS_AGAIN_S)


def _derived(secret: str, *said: str) -> str:
    if not secret:
        raise ValueError("the cluster's secret is not known")
    return hmac.new(secret.encode(), "\0".join(said).encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


def _is_same(expected: str, text: str) -> bool:
    return hmac.compare_digest(expected.encode(), text.encode(errors="surrogatepass"))
