"""Chat templates in the styles of the families that one meets, each with its own way of turns, tools and contents."""

from __future__ import annotations

from pathlib import Path

STYLES = {
    file.stem: file.read_text(encoding="utf-8")
    for file in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))
}
TAKES_TEXT = frozenset({"deepseek"})
"""Those that take the arguments of calls as text."""
NEEDS_PARTS = frozenset({"only-parts"})
"""Those that take no content that is text."""
