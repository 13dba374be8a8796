"""Every link between our documents leads somewhere, headings included, and every page is in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _text(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    plain = (re.sub(r"[`*]|\[|\]\([^)]*\)", "", heading).lower() for heading in _HEADING.findall(_text(page)))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_links_of_a_page_lead_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for target in (found or other for found, other in _LINK.findall(_text(page))):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
            broken.append(target)
    assert broken == []


def test_every_page_is_reached_from_the_index() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in seen and page.exists():
            seen.add(page)
            targets = (found or other for found, other in _LINK.findall(_text(page)))
            links = ((page.parent / target.partition("#")[0]).resolve() for target in targets if "://" not in target)
            waiting += [link for link in links if link.suffix == ".md"]
    model_cards = set((ROOT / "examples" / "adapters").rglob("*.md"))
    assert set(PAGES) - seen - model_cards == set()
