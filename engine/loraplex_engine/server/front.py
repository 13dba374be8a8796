"""What the routes of one engine share, and the path of a generation up to its start.

`Front` owns the tokenizer, the request log and the metrics; the core is somebody else's, reached through `core`.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec

from loraplex_engine.errors import EngineError, ModelNotFoundError
from loraplex_engine.parity.golden import GOLDEN_TEXTS, MAX_PROMPT_TOKENS
from loraplex_engine.server.answer import AnswerOptions, GenerationAnswer
from loraplex_engine.server.call import Caller
from loraplex_engine.server.chunk import AnswerFacts, ChatRenderer, CompletionRenderer, Renderer
from loraplex_engine.server.constraint.field import read_constraint
from loraplex_engine.server.constraint.task import GrammarTask
from loraplex_engine.server.conversation import ConversationReader
from loraplex_engine.server.core_client import CoreClient
from loraplex_engine.server.echo import PartOptions, build_parts
from loraplex_engine.server.field.request import read_chat, read_completion, read_tokenize
from loraplex_engine.server.field.sampling import LENGTHS
from loraplex_engine.server.generation import Generation, GenerationSpec
from loraplex_engine.server.metric import FrontMetrics
from loraplex_engine.server.prompt import DEFAULT_COMPLETION_TOKENS, PromptReader, check_ids, fit_max_tokens
from loraplex_engine.server.request_log import RequestLog
from loraplex_engine.server.sandbox.client import Sandbox
from loraplex_engine.server.spec import build_params, build_spec, check_generations, check_min_tokens, check_size
from loraplex_engine.server.template_library import TemplateFiles, TemplateLibrary
from loraplex_engine.server.tokenizer import Tokenizer
from loraplex_engine.wire.done import RequestDone
from loraplex_engine.wire.messages import CancelParity, CoreReady, Drain, MeasureParity
from loraplex_engine.wire.openai import ModelCard, SamplingFields, TokenizeRequest, TokenizeResponse
from loraplex_registry.wire.digest import check_digest
from loraplex_registry.wire.protocol import SPOKEN

PARITY_TIMEOUT_S = 305.0
"""A little longer than a core takes at most."""


class Front:
    """The front of one engine."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        core: CoreClient,
        files: TemplateFiles | None = None,
        *,
        tool_call_parser: str = "auto",
    ) -> None:
        self.core = core
        self.log = RequestLog()
        self.metrics = FrontMetrics()
        self._tokenizer = tokenizer
        self._prompts = PromptReader(tokenizer)
        self._sandbox = Sandbox()
        self._templates = TemplateLibrary(tokenizer, self._sandbox, files)
        self._conversations = ConversationReader(self._templates, self._prompts, tokenizer.table, tool_call_parser)
        self._started_at = int(time.time())
        self.metrics.open_requests.set_function(lambda: self.log.num_open)

    def close(self) -> None:
        """Let go of the tokenizer's thread and of the sandbox."""
        self._prompts.close()
        self._templates.close()
        self._sandbox.close()

    def warm(self) -> None:
        """Start the sandbox, so that the first request that needs it does not wait for that."""
        self._sandbox.start()

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests, wait for the open ones (bounded) and return how many are left."""
        self.core.is_draining = True
        if self.log.num_open:
            with contextlib.suppress(EngineError):
                await self.core.call(Drain, timeout_s)
        return self.log.num_open

    def fail_all(self, error: EngineError) -> None:
        """End every open request with an error."""
        for generation in self.log.all_open():
            generation.fail(error)

    async def create_chat(self, body: dict[str, Any], caller: Caller) -> GenerationAnswer:
        """Return the answer to a chat, not yet started. Raises CallError if it is refused."""
        facts, request = self.core.get_facts(), read_chat(body)
        digest = self._resolve(request.model, facts)
        chat = await self._conversations.read(request, digest, facts.max_model_len, tenant_id=caller.tenant_id)
        max_tokens = self._fit(request, [chat.ids], facts, default=None, param="messages")
        options = PartOptions(listed=request.prompt_logprobs)
        params = build_params(
            request,
            max_tokens,
            facts.vocab_size,
            logprobs=request.top_logprobs if request.logprobs else None,
            prompt_logprobs=options.most,
            grammar=await self._compile(chat.task, caller),
        )
        spec = msgspec.structs.replace(
            build_spec(request, caller, [chat.ids], params, digest, param="messages"),
            continues_prompt=request.continue_final_message,
            parts=build_parts([chat.ids], options),
            plan=chat.plan,
            grammar_param=chat.task.param if chat.task is not None else None,
        )
        answer_facts = self._answer_facts("chatcmpl", request, caller, facts)
        renderer = ChatRenderer(
            answer_facts,
            has_logprobs=request.logprobs,
            may_call=chat.plan is not None,
            nulls_usage=_includes_usage(request),
        )
        return self._answer(request, caller, spec, renderer, options)

    async def create_completion(self, body: dict[str, Any], caller: Caller) -> GenerationAnswer:
        """Return the answer to a completion, not yet started. Raises CallError if it is refused."""
        facts, request = self.core.get_facts(), read_completion(body)
        digest = self._resolve(request.model, facts)
        prompts = await self._prompts.read_prompts(request.prompt, facts.max_model_len, tenant_id=caller.tenant_id)
        check_generations(len(prompts), request.n)
        max_tokens = self._fit(request, prompts, facts, default=DEFAULT_COMPLETION_TOKENS, param="prompt")
        options = PartOptions(echoed=request.logprobs if request.echo else None, listed=request.prompt_logprobs)
        task = read_constraint(request)
        params = build_params(
            request,
            max_tokens,
            facts.vocab_size,
            logprobs=request.logprobs,
            prompt_logprobs=options.most,
            grammar=await self._compile(task, caller),
        )
        parts = build_parts(prompts, options)
        if request.echo:
            has_scores = options.most is not None
            parts = await self._prompts.read_echoes(
                request.prompt, prompts, has_scores=has_scores, tenant_id=caller.tenant_id
            )
        spec = msgspec.structs.replace(
            build_spec(request, caller, prompts, params, digest, param="prompt"),
            continues_prompt=True,
            parts=parts,
            grammar_param=task.param if task is not None else None,
        )
        answer_facts = self._answer_facts("cmpl", request, caller, facts)
        has_logprobs, nulls_usage = request.logprobs is not None, _includes_usage(request)
        renderer = CompletionRenderer(answer_facts, has_logprobs=has_logprobs, nulls_usage=nulls_usage)
        return self._answer(request, caller, spec, renderer, options)

    async def tokenize(self, body: dict[str, Any], caller: Caller) -> tuple[TokenizeResponse, str | None]:
        """Return the ids that a generation route would compute, and the digest asked for; CallError if refused."""
        facts, request = self.core.get_facts(), read_tokenize(body)
        digest = self._resolve(request.model, facts)
        ids = await self._read_tokens(request, digest, caller, facts)
        return TokenizeResponse(len(ids), facts.max_model_len, ids), digest

    async def measure_parity(self, digest: str) -> dict[str, Any]:
        """Return a `ParityResult` of the adapter; a caller that gives up ends the measurement.

        Raises:
            EngineError: As `CoreClient.call`: it cannot be loaded, too many wait, or no reference could be computed.
        """
        facts = self.core.get_facts()
        texts = [await self._prompts.read_text(text, facts.max_model_len) for text in GOLDEN_TEXTS]
        body = await self.core.call(
            MeasureParity,
            PARITY_TIMEOUT_S,
            CancelParity,
            digest=digest,
            texts=[ids[:MAX_PROMPT_TOKENS] for ids in texts],
        )
        return {**body, "weights_digest": facts.weights_digest} if isinstance(body, dict) else {}

    def models(self) -> list[ModelCard]:
        """Return what can be named here: the base. Adapters are named by digest and listed in the state."""
        name = self.core.get_facts().name
        return [ModelCard(id=name, created=self._started_at, owned_by="platform", root=name, parent=None)]

    async def _compile(self, task: GrammarTask | None, caller: Caller) -> str | None:
        """Return a grammar as the core takes it."""
        return None if task is None else await self._sandbox.compile(task, tenant_id=caller.tenant_id)

    async def _read_tokens(
        self, request: TokenizeRequest, digest: str | None, caller: Caller, facts: CoreReady
    ) -> list[int]:
        if request.messages is not None:
            return await self._conversations.read_ids(request, digest, facts.max_model_len, tenant_id=caller.tenant_id)
        assert request.prompt is not None
        return await self._prompts.read_text(
            request.prompt,
            facts.max_model_len,
            add_special_tokens=request.add_special_tokens,
            tenant_id=caller.tenant_id,
        )

    def _resolve(self, model: str, facts: CoreReady) -> str | None:
        """Return the digest that `model` names, None for the base, which its own digest names too.

        Whoever names it so is answered by these files or not at all.
        """
        if model == facts.name or (model == facts.digest and facts.digest):
            return None
        try:
            return check_digest(model)
        except ValueError as error:
            raise ModelNotFoundError(param="model") from error

    def _fit(
        self, request: SamplingFields, prompts: list[list[int]], facts: CoreReady, *, default: int | None, param: str
    ) -> int:
        for ids in prompts:
            check_ids(ids, facts.vocab_size, param)
        check_ids(request.stop_token_ids, facts.vocab_size, "stop_token_ids")
        check_ids(list(map(int, request.logit_bias)), facts.vocab_size, "logit_bias")
        longest = max(map(len, prompts))
        asked_by = next((name for name in LENGTHS if getattr(request, name, None) is not None), None)
        max_tokens = fit_max_tokens(
            longest, request.max_tokens, facts.max_model_len, default=default, param=param, asked_by=asked_by
        )
        check_min_tokens(request.min_tokens, max_tokens)
        return max_tokens

    def _answer_facts(self, prefix: str, request: SamplingFields, caller: Caller, facts: CoreReady) -> AnswerFacts:
        return AnswerFacts(
            id=f"{prefix}-{caller.request_id.removeprefix('req_')}",
            created=int(time.time()),
            model=caller.echo_model or request.model,
            system_fingerprint=f"fp_{facts.weights_digest.removeprefix('sha256:')[:12]}",
        )

    def _answer(
        self,
        request: SamplingFields,
        caller: Caller,
        spec: GenerationSpec,
        renderer: Renderer,
        part: PartOptions,
    ) -> GenerationAnswer:
        check_size(request, spec, part)
        generation = Generation(self.core, spec, self._tokenizer.table, renderer.writer)
        self.log.add(generation, self._count)
        options = AnswerOptions(
            is_stream=request.stream,
            includes_usage=_includes_usage(request),
            includes_done=caller.wants_done,
            part=part,
        )
        return GenerationAnswer(generation, renderer, options, self.metrics)

    def _count(self, done: RequestDone) -> None:
        self.metrics.count_generation(done)


def _includes_usage(request: SamplingFields) -> bool:
    return request.stream_options is not None and request.stream_options.include_usage


def build_state(front: Front, core_state: dict[str, Any] | None) -> dict[str, Any]:
    """Return the engine's state: the core's, and what only the front knows."""
    facts = front.core.facts
    return {
        **(core_state or {}),
        "protocol": SPOKEN,
        "is_ready": front.core.is_ready and not front.core.is_draining,
        "is_draining": front.core.is_draining,
        "open_requests": front.log.num_open,
        "usage": msgspec.structs.asdict(front.log.totals),
        "model": None if facts is None else msgspec.structs.asdict(facts),
    }
