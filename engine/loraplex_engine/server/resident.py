"""Which adapters a core had, so that the next one can bring them back. `Residents` knows digests and nothing else."""

from __future__ import annotations

from collections import OrderedDict


class Residents:
    """Digests that were of use, the latest last, and which of them are pinned."""

    def __init__(self) -> None:
        self._digest_to_pin: OrderedDict[str, bool] = OrderedDict()

    def note(self, digest: str, *, pin: bool | None = None) -> None:
        """The core has the digest; `pin` None: pinned or not as it was."""
        self._digest_to_pin[digest] = self._digest_to_pin.get(digest, False) if pin is None else pin
        self._digest_to_pin.move_to_end(digest)

    def forget(self, digest: str) -> None:
        """The digest was dropped."""
        self._digest_to_pin.pop(digest, None)

    def trim(self, count: int) -> None:
        """Keep the pinned ones and the latest others, no more than `count` of these."""
        loose = [digest for digest, pin in self._digest_to_pin.items() if not pin]
        for digest in loose[: max(0, len(loose) - count)]:
            del self._digest_to_pin[digest]

    def take(self) -> list[tuple[str, bool]]:
        """All of them with their pins, pinned ones first, then the latest first; and forget them.

        NOTE: each is handed out once, and comes back by `note` when it is loaded: one that brings a core down is not
        given to the next.
        """
        latest_first = list(reversed(self._digest_to_pin.items()))
        self._digest_to_pin.clear()
        return sorted(latest_first, key=lambda item: not item[1])
