#!/usr/bin/python3 -I
"""`loraplex-healthcheck URL`: ends with 0 if the URL answers 200 within three seconds, else says why and with 1."""

from __future__ import annotations

import sys
import urllib.request

_TIMEOUT_S = 3


def main(url: str) -> int:
    """Ask once; proxies of the environment are for other hosts."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as answer:
            print(answer.read(200).decode(errors="replace"))
            return 0 if answer.status == 200 else 1
    except OSError as error:
        print(f"{url}: {error}")
        return 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: loraplex-healthcheck URL")
    sys.exit(main(sys.argv[1]))
