"""What can be wrong with an adapter's files, as exceptions inside the rule set.

    PeftRuleError
    ├── AdapterFileError   a file's bytes break a named check
    ├── JsonError          bytes are not strict JSON
    └── PatternError       a regular expression is invalid, too long or too slow

None of them leaves `check_adapter`: it turns each into a failing check.
"""

from __future__ import annotations


class PeftRuleError(Exception):
    """An adapter's files break a rule: read the report and save the adapter again with PEFT's `save_pretrained`."""

    code = "adapter_rejected"


class AdapterFileError(PeftRuleError):
    """A file's bytes break the named check: upload the file again as PEFT wrote it."""

    def __init__(self, check: str, message: str, subject: str) -> None:
        super().__init__(message)
        self.check = check
        self.message = message
        self.subject = subject


class JsonError(PeftRuleError):
    """The text is not strict JSON: write it with a JSON library, in UTF-8 without a byte order mark."""


class PatternError(PeftRuleError):
    """A regular expression cannot be used: write a shorter or simpler one, or list the modules by name."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(reason)
        self.source = source
        self.reason = reason
