"""Opens guides for requests. `Guides` owns the threads that follow grammars and the grammars that were built lately.

llguidance lets go of the interpreter's lock while it works, and so do the model's ops: masks cost the step loop some
microseconds a row as long as they are there when the model has run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import llguidance

from loraplex_engine.errors import GrammarError
from loraplex_engine.guide.fair_thread import FairThread
from loraplex_engine.guide.grammar_guide import Endings, GrammarGuide, Sizes, check_matcher
from loraplex_engine.guide.rounds import Rounds
from loraplex_engine.guide.vocabulary import build_limits
from loraplex_engine.wire.messages import SamplingParams

_MAX_BUILT = 16


class Guides:
    """Guides for one base."""

    def __init__(
        self, vocabulary: llguidance.LLTokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._limits = build_limits()
        self._built: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        # builds one after the other, tenants in turn: choices of one request find what the first has built
        self._builder = FairThread("grammar-build")
        self._rounds = Rounds()

    def open(self, params: SamplingParams, tenant_id: str = "") -> GrammarGuide:
        """Return the guide of a request that has a grammar; nothing is built yet. Tenants take turns in that.

        Raises:
            GrammarError: The base's tokenizer allows for none.
        """
        vocabulary = self._vocabulary
        assert params.grammar is not None
        if vocabulary is None:
            raise GrammarError("This base's tokenizer allows for no structured output.")
        return GrammarGuide(
            partial(self._build, vocabulary, params.grammar),
            Endings.of(params, self._eos_token_ids),
            Sizes(vocabulary.vocab_size, self._vocab_size),
            partial(self._builder.submit, tenant_id),
            self._rounds,
        )

    def _build(self, vocabulary: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
        """A matcher at the start; a copy takes microseconds and shares no state that grows."""
        matcher = self._built.pop(grammar, None)
        if matcher is None:
            matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=self._limits)
            check_matcher(matcher)
        self._built[grammar] = matcher
        if len(self._built) > _MAX_BUILT:
            self._built.popitem(last=False)
        return matcher.deep_copy()
