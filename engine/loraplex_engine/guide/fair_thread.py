"""One thread for the work of many tenants, who take turns: who asks for much holds up only itself."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class FairThread:
    """Does one piece of work at a time; of one tenant in the order in which it asked."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = Lock()
        # the tenant whose turn it is comes first
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()

    def submit(self, tenant_id: str, work: Callable[[], _Result]) -> Future[_Result]:
        """Let the thread do a piece of work in the tenant's turn."""
        future: Future[_Result] = Future()
        with self._lock:
            self._waiting.setdefault(tenant_id, deque()).append((future, work))
        self._executor.submit(self._do_next)
        return future

    def _do_next(self) -> None:
        with self._lock:
            tenant_id, queue = self._waiting.popitem(last=False)
            future, work = queue.popleft()
            if queue:
                self._waiting[tenant_id] = queue
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
