"""The texts that every adapter is tried on: prose, code, a chat, other scripts, digits and signs."""

from __future__ import annotations

_PROSE = (
    "The mill stood at the bend of the river, and for eighty years its wheel had turned the grain of the valley into "
    "flour. When the last miller died, his daughter came back from the city to sell it."
)
_CODE = (
    "def count_words(text: str) -> dict[str, int]:\n    counts = {}\n    for word in text.lower().split():\n"
    "        counts[word] = counts.get(word, 0) + 1\n    return counts\n"
)
_CHAT = (
    "User: My order 4471-B has not arrived, and it was due on 12 March. What can I do?\n"
    "Assistant: I am sorry to hear that. Let me look it up; could you tell me the postcode?"
)
_SCRIPTS = (
    "Der Zug fährt um 7:45 Uhr. Où est la gare? Поезд уже ушёл. 山の上に月が出た。 हम कल मिलेंगे। 12.5 % < 3/8 → ok 🙂"
)
GOLDEN_TEXTS = (_PROSE, _CODE, _CHAT, _SCRIPTS)
MAX_PROMPT_TOKENS = 40
"""Of each text at most so many are computed."""
