"""The libraries that speak to etcd, which are installed only with the extra ``cluster``.

Only the messages are taken from etcd-sdk-python. Its client hides what a cluster must know: a watch ends silently when
the connection breaks, a failed endpoint is shunned for five minutes, calls have no deadline unless the whole client
has one, a token that has expired is never renewed, and all watches share one thread in which one slow receiver stops
the rest.
"""

from __future__ import annotations

import os

from unicron_elastic.base.extras import Unusable, why_missing

__all__ = ["grpc", "messages"]

# gRPC's own handling of forks cannot be used here: it gives up, with a line on stderr, as soon as a watch runs. What is
# started later gets the environment as it was.
_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"
_was_set = os.environ.get(_FORK_SUPPORT)
os.environ.setdefault(_FORK_SUPPORT, "0")

try:
    import grpc
    from pyetcd import etcdrpc as messages
except ImportError as error:
    raise Unusable(why_missing(error) or f"what speaks to etcd cannot be imported: {error}") from error
except Exception as error:  # protobuf of a version that its messages do not fit, or other messages of the same name
    raise Unusable(f"etcd-sdk-python cannot be used beside what is installed here: {error}") from error
finally:
    if _was_set is None:
        del os.environ[_FORK_SUPPORT]
