"""The generating routes: body in, prompts to token ids, choices out, streamed or whole. Owns the sequence of
steps and how a prompt is made, not shapes or engine requests."""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.contract import SnapshotContent, Submission, Thought, TokenEvent
from penstock.errors import ContextExceeded, InvalidRequest, PenstockError, PromptTooLong, ResponseMissing
from penstock.models.chat import ANSWERED, Rendering
from penstock.server import messages, responses, schema
from penstock.server.access import Exchange, exchange_of
from penstock.server.connection import while_connected
from penstock.server.faults import fault_of
from penstock.server.kept import KeptResponse
from penstock.server.replies import ChatReply, CompletionReply, Heading, usage_of
from penstock.server.schema import ChatBody, CompletionBody, Message, PrefetchBody
from penstock.server.service import Generations, Rules, Service
from penstock.server.thinking import is_off, reasons, thought_of, variables_of
from penstock.server.tools import Asked, Tool, calls_or_form, format_of, reader_of, told
from penstock.text.answer import (
    AnswerFormat,
    ChoiceDelta,
    ChoiceText,
    MarkedTokens,
    Prompt,
    StopString,
    TextStream,
    TokenBytes,
    Wants,
    showing,
)

if TYPE_CHECKING:
    from penstock.models.tokenizer import TextCodec


_MESSAGES = msgspec.json.Decoder(list[Message])


def beyond_context(error: PromptTooLong) -> ContextExceeded:
    """For a prompt that is to be computed: too long means that it does not fit the context."""
    return ContextExceeded(error.most, f"your prompt has {error.what}", error.param or "prompt")


def prompts_of(
    tokenizer: TextCodec,
    body: CompletionBody | ChatBody,
    rules: Rules,
    before: SnapshotContent | None = None,
    reasons: bool = False,
) -> list[Prompt]:
    """The prompts of a body; a text body has one per item. `before`: a snapshot to continue. For a text: its
    tokens, then the tokens of each prompt, tokenized separately. For a conversation: its messages, then the
    request's, rendered by the template as one, as if the client had sent all of them."""
    most = body.num_kept(rules.fitting)
    if isinstance(body, ChatBody):
        said = body.messages
        if before is not None and not before.messages:
            message = (
                "this snapshot was not taken of messages, so a conversation cannot be continued from it: "
                "use /v1/completions"
            )
            raise InvalidRequest(message, "snapshot")
        if before is not None:
            said = [*_MESSAGES.decode(before.messages), *said]
        how = rendering_of(tokenizer, body, reasons)
        of_chat = encode_chat(tokenizer, said, rules, body.asking.shown, how)
        return [Prompt(last_of(of_chat, most), ends=not how.continues, variables=how.variables)]
    start = [] if before is None else np.frombuffer(before.tokens, np.uint32).tolist()
    prompts = []
    for item in body.items:
        ids = encode_prompt(
            tokenizer, item, rules, begins=before is None and body.add_special_tokens is not False
        )
        kept = last_of(ids, most)
        if isinstance(item, str) and kept is ids:
            text = item
        else:
            text = tokenizer.decode(kept, skip_special=False) if body.echo else ""
        prompt = Prompt([*start, *kept] if start else kept, text)
        scored = body.echo and body.logprobs is not None
        prompts.append(prompt._replace(offsets=prompt_offsets(tokenizer, prompt)) if scored else prompt)
    return prompts


def last_of(ids: Sequence[int], num: int | None) -> Sequence[int]:
    """The last `num` of them; None: all."""
    return ids if num is None or len(ids) <= num else ids[-num:]


def rendering_of(tokenizer: TextCodec, body: ChatBody, reasons: bool) -> Rendering:
    """The fields of a chat as variables of the model's template."""
    given, template = body.chat_template_kwargs or {}, tokenizer.chat_template
    if template is not None:
        given = variables_of(body.reasoning_effort, given, template.of(body.asking.shown), reasons)
    return Rendering(body.add_generation_prompt is not False, bool(body.continue_final_message), given)


def encode_chat(
    tokenizer: TextCodec,
    messages: Sequence[Message],
    rules: Rules,
    tools: Sequence[Tool] = (),
    how: Rendering = ANSWERED,
) -> list[int]:
    if not tokenizer.has_chat_template:
        raise InvalidRequest("this model has no chat template: use /v1/completions", "messages")
    told_messages, told_tools = told([message.as_dict() for message in messages], tools, tokenizer)
    return tokenizer.encode_chat(told_messages, rules.most, rules.special_in_text, told_tools, how)


def encode_prompt(
    tokenizer: TextCodec, given: str | Sequence[int], rules: Rules, begins: bool = True
) -> Sequence[int]:
    """The engine refuses ids that the model does not have. `begins`: a text gets the model's leading
    tokens."""
    if isinstance(given, str):
        return tokenizer.encode(given, add_special=begins, most=rules.most)
    check_num_tokens(given, rules.most, "prompt")
    return given


def encode_given(tokenizer: TextCodec, body: PrefetchBody, rules: Rules) -> list[int]:
    """The prompt or the messages of a body that has one of them, as a generating route would take it."""
    try:
        if body.messages is not None:
            return encode_chat(tokenizer, body.messages, rules)
        return list(encode_prompt(tokenizer, body.prompt or "", rules))
    except PromptTooLong as error:
        raise beyond_context(error) from None


def check_num_tokens(ids: Sequence[int], most: int, param: str) -> None:
    if len(ids) > most:
        raise PromptTooLong(f"{len(ids)} tokens", most, param)


def check_ids(tokenizer: TextCodec, ids: Sequence[int], param: str) -> None:
    highest = max(ids, default=0)
    if highest >= tokenizer.vocab_size:
        raise InvalidRequest(
            f"{param}: token id {highest} is outside the vocabulary of {tokenizer.vocab_size}", param
        )


def prompt_offsets(tokenizer: TextCodec, prompt: Prompt) -> list[int]:
    """The character of the prompt's text at which each of its tokens begins, or which it continues, as for
    generated tokens.

    Tokens that the tokenizer adds (special tokens, a leading blank) lie at the ends and do not shift the
    rest.
    """
    # special tokens are part of the client's text
    stream = TextStream(MarkedTokens(tokenizer.token_bytes, tokenizer.errors))
    delta = stream.push(prompt.ids)
    text = delta.text + stream.finish()
    extra = max(0, text.rfind(prompt.text))
    return (
        [min(max(0, offset - extra), len(prompt.text)) for offset in delta.offsets]
        if prompt.text in text
        else list(delta.offsets)
    )


logger = logging.getLogger("penstock.server")


def owner_of(scope: Scope, cache_salt: str | None) -> str:
    """The owner of an answer, who may continue it: requests with the same key and the same cache_salt. Only a
    digest is kept."""
    keys = [value for name, value in scope["headers"] if name in (b"authorization", b"x-api-key")]
    framed = msgspec.json.encode([[key.hex() for key in keys], cache_salt or ""])
    return hashlib.sha256(framed).hexdigest()


SCORE_BYTES = 64  # of JSON for one token and one score
Reply = ChatReply | CompletionReply | messages.MessagesReply | responses.ResponsesReply


class RouteKind(NamedTuple):
    """The differences between generating routes. Routes of other APIs than OpenAI's are chats in another
    format."""

    body: type[msgspec.Struct]
    reply: Callable[[TextCodec, Any, Heading, AnswerFormat | None], Reply]  # of the body as it was given
    id_prefix: str
    translate: Callable[[Any], CompletionBody | ChatBody] = lambda given: given
    names: Mapping[str, str] = MappingProxyType({})  # of the translated fields in the original body
    queries: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    keeps: bool = False  # answers can be continued by their ids


# by name, which groups statistics of answer lengths
KINDS = {
    "completions": RouteKind(CompletionBody, CompletionReply, "cmpl-"),
    "chat": RouteKind(ChatBody, ChatReply, "chatcmpl-"),
    "messages": RouteKind(
        messages.MessagesBody,
        messages.MessagesReply,
        "msg_",
        messages.as_chat,
        messages.NAMES,
        messages.QUERIES,
    ),
    "responses": RouteKind(
        responses.ResponsesBody,
        responses.ResponsesReply,
        "resp_",
        responses.as_chat,
        responses.NAMES,
        keeps=True,
    ),
}


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A running request: the body, the engine requests that answer it, and the form of the answer."""

    body: CompletionBody | ChatBody
    prompts: list[Prompt]
    choices: list[ChoiceText]
    reading: Generations
    reply: Reply
    service: Service
    exchange: Exchange
    # called with the complete answer
    keep: Callable[[Reply, dict[str, Any]], Awaitable[None]] | None = None

    async def wait_kept(self) -> None:
        """Before the client gets the end of the answer, since it may continue it at once. If it cannot be
        kept, it is still an answer."""
        if self.keep is not None:
            try:
                await self.keep(self.reply, self.usage())
            except PenstockError as error:
                logger.warning("an answer was not kept: %s", error)

    def usage(self) -> dict[str, Any]:
        return usage_of(self.prompts, self.choices, self.body.n or 1)

    async def next_pieces(self) -> dict[int, ChoiceDelta] | None:
        """New output of the choices; None once all are complete. A choice that met a stop string no longer
        needs its engine request.

        A failed choice fails the reply, after its earlier output is sent.
        """
        if all(choice.finish is not None for choice in self.choices):
            return None
        for choice in self.choices:
            if choice.failure is not None:
                raise choice.failure
        pieces: dict[int, ChoiceDelta] = {}
        for index, events in (await self.reading.next_events()).items():
            choice = self.choices[index]
            self._note(events)
            if choice.finish is not None:
                continue
            piece = choice.feed(events)
            if piece.text or piece.tokens or piece.finish or piece.ids or piece.prompt:
                pieces[index] = piece
            if piece.stop is not None:
                await self.reading.end(index, choice.num_shown)
        return pieces

    def _note(self, events: Iterable[TokenEvent]) -> None:
        exchange = self.exchange
        for event in events:
            if event.waited_s is not None and event.waited_s >= (exchange.queue_s or 0.0):
                exchange.queue_s = event.waited_s
                exchange.matched_s, exchange.loaded_s = event.matched_s or 0.0, event.loaded_s or 0.0
            if exchange.first_s is None and event.tokens:
                exchange.first_s = time.monotonic()

    def settle(self) -> None:
        """Record the outcome in the exchange, even if it was cut short."""
        exchange, usage = self.exchange, self.usage()
        exchange.prompt_tokens, exchange.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        exchange.sources = usage["prompt_tokens_details"]["kv_source"]
        unfinished = "cancelled" if all(choice.failure is None for choice in self.choices) else "error"
        exchange.finish = [choice.finish or unfinished for choice in self.choices]

    async def write(self, make: Callable[[], bytes], pieces: Iterable[ChoiceDelta]) -> bytes:
        """JSON of `pieces`. With many scores, not on the event loop's thread."""
        body = self.body
        num_scores = sum(
            len(piece.tokens) * (1 + (body.num_logprobs or 0))
            + len(piece.prompt or ()) * (1 + (body.prompt_logprobs or 0))
            for piece in pieces
        )
        return await self.service.compute(make, num_scores * SCORE_BYTES)


class Incoming(NamedTuple):
    """A checked body. The raw bytes are not kept while the request runs."""

    given: Any
    body: CompletionBody | ChatBody  # its translation
    num_bytes: int
    owner: str  # of the answer


class Generate:
    """ASGI endpoint of one generating route."""

    def __init__(self, service: Service, name: str) -> None:
        self._service = service
        self._name, self._kind = name, KINDS[name]
        schema.decoder(self._kind.body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange, service = exchange_of(scope), self._service
        with service.open_reading(exchange.unique) as reading:
            incoming = await self._read(scope, receive)
            body = incoming.body
            reading.seats.widen(body.num_prompts * (body.n or 1))

            async def work() -> None:
                form = self._form(body)
                async with service.compiled(form):
                    before = body.snapshot and await service.open_snapshot(body, body.snapshot)
                    num_bytes = incoming.num_bytes + (len(before.tokens) if before else 0)
                    submit = partial(self._submit, incoming, form, reading, exchange, before or None)
                    running = await service.compute(submit, num_bytes)
                try:
                    await (_stream if body.stream else _whole)(running, scope, receive, send)
                    reading.saw_all()
                finally:
                    running.settle()

            with schema.renamed(self._kind.names):
                await while_connected(receive, reading.abandon, work)

    async def _read(self, scope: Scope, receive: Receive) -> Incoming:
        kind, service = self._kind, self._service
        given, num_bytes = await service.body(Request(scope, receive), kind.body, **kind.queries)
        owner = owner_of(scope, getattr(given, "cache_salt", None))
        if kind.keeps and (id := given.previous_response_id) is not None:
            try:
                kept: KeptResponse = await service.ask("responses.find", id, owner)
            except ResponseMissing:
                raise responses.missing(id) from None
            given, num_bytes = responses.continued(given, kept), num_bytes + sum(map(len, kept))
        body = kind.translate(given)
        with schema.renamed(kind.names):
            body.check()
        return Incoming(given, body, num_bytes, owner)

    def _form(self, body: CompletionBody | ChatBody) -> Asked | None:
        """The required form of the answer, in this model's format."""
        asked, config, tokenizer = body.asked(), self._service.config, self._service.engine.tokenizer
        if asked is None or not isinstance(body, ChatBody) or body.asking.choice != "auto":
            return asked
        return calls_or_form(body.asking, asked, reader_of(body.asking, config, tokenizer), tokenizer)

    async def _keep(self, incoming: Incoming, reply: Any, usage: dict[str, Any]) -> None:
        response, items = reply.ended(usage), incoming.given.items()
        kept = KeptResponse(msgspec.json.encode(items), msgspec.json.encode(response))
        await self._service.ask("responses.keep", response["id"], incoming.owner, kept)

    def _submit(
        self,
        incoming: Incoming,
        form: Asked | None,
        reading: Generations,
        exchange: Exchange,
        before: SnapshotContent | None,
    ) -> OpenRequest:
        """On a worker thread if the body is large."""
        body, service, kind = incoming.body, self._service, self._kind
        tokenizer, thinks = service.engine.tokenizer, reasons(service.config, service.engine.tokenizer)
        is_whole = body.truncate_prompt_tokens is None
        rules = service.prompt_rules if is_whole else service.side_rules
        try:
            prompts = prompts_of(tokenizer, body, rules, before, thinks)
        except PromptTooLong as error:
            raise beyond_context(error) if is_whole else error from None
        read_as = thought = None
        if isinstance(body, ChatBody):
            budget = None if is_off(prompts[0].variables) else body.thinking_token_budget
            thinks = thinks and (form is None or budget is not None)
            reader = reader_of(body.asking, service.config, tokenizer)
            read_as = format_of(body.asking, form is not None, thinks, tokenizer, reader, prompts[0].ids)
            if thinks and budget is not None and read_as is not None:
                thought = thought_of(budget, read_as.begun, tokenizer)
        codec: Any = tokenizer if read_as is None else showing(tokenizer, read_as)
        if body.skip_special_tokens is False:
            codec = MarkedTokens(tokenizer.token_bytes, tokenizer.errors)
        exchange.submitted_s = time.monotonic()
        exchange.model, exchange.stream = body.model, bool(body.stream)
        choices = self._submit_all(body, prompts, reading, codec, form, thought)
        head = Heading(f"{kind.id_prefix}{reading.id}", body.model, prompts=prompts)
        reply = kind.reply(tokenizer, incoming.given, head, read_as)
        keep = partial(self._keep, incoming) if kind.keeps and incoming.given.store is not False else None
        return OpenRequest(body, prompts, choices, reading, reply, service, exchange, keep)

    def _submit_all(
        self,
        body: CompletionBody | ChatBody,
        prompts: Sequence[Prompt],
        reading: Generations,
        codec: TokenBytes,
        form: Asked | None,
        thought: Thought | None,
    ) -> list[ChoiceText]:
        engine, choices = self._service.engine, list[ChoiceText]()
        echo, ids, stop = map(bool, (body.echo, body.return_token_ids, body.include_stop_str_in_output))
        wants = Wants(echo, ids, stop, body.prompt_logprobs is not None)
        banned = engine.tokenizer.bad_token_ids(tuple(body.bad_words or ()))
        stops, asked = tuple(map(StopString, body.stops)), body.options()  # one of each for all choices
        # the same content for all choices, even if the adapter is reloaded meanwhile
        with self._service.hold_model(body.model) as adapter:
            for prompt, i in itertools.product(prompts, range(body.n or 1)):
                sampling = body.sampling(engine.max_model_len - len(prompt.ids), engine.facts.sampling)
                if form is not None or (thought is not None and thought.most < sampling.max_tokens):
                    grammar = None if form is None else form.grammar
                    sampling = replace(sampling, grammar=grammar, thought=thought)
                if banned:
                    sampling = replace(sampling, bad_token_ids=banned)
                if sampling.seed is not None:
                    sampling = replace(sampling, seed=schema.nth_seed(sampling.seed, i))
                if i and isinstance(body, ChatBody):  # a chat has its prompt's scores once
                    sampling = replace(sampling, prompt_logprobs=None)
                # a session is one sequence: the first choice
                whose = {**asked, "session": "", "hint": None} if choices else asked
                one = Submission(prompt.ids, sampling, adapter=adapter, route=self._name, **whose)
                reading.submit(len(choices), one)
                choices.append(ChoiceText(codec, sampling, stops, prompt, wants))
        return choices


async def _whole(running: OpenRequest, scope: Scope, receive: Receive, send: Send) -> None:
    gathered: list[list[ChoiceDelta]] = [[] for _ in running.choices]
    while (pieces := await running.next_pieces()) is not None:
        for index, piece in pieces.items():
            gathered[index].append(piece)
    joined = [_joined(said) for said in gathered]
    content = await running.write(
        lambda: msgspec.json.encode(running.reply.whole(joined, running.usage())), joined
    )
    await running.wait_kept()
    await Response(content, media_type="application/json")(scope, receive, send)


def _joined(pieces: list[ChoiceDelta]) -> ChoiceDelta:
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    ids = tuple(id for piece in pieces for id in piece.ids)
    scores = next((piece.prompt for piece in pieces if piece.prompt), None)
    return ChoiceDelta(
        "".join(piece.text for piece in pieces), tokens, pieces[-1].finish, pieces[-1].stop, ids, scores
    )


async def _stream(running: OpenRequest, scope: Scope, receive: Receive, send: Send) -> None:
    """Once the status line is sent, an error can only be the last event of the stream."""
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    try:
        while (pieces := await running.next_pieces()) is not None:
            if data := await running.write(
                partial(running.reply.events, pieces, running.usage), pieces.values()
            ):
                await send({"type": "http.response.body", "body": data, "more_body": True})
                for index in pieces:
                    running.reading.saw(index, running.choices[index].num_shown)
        last = running.reply.closing(running.usage)
        await running.wait_kept()
    except Exception as error:
        logger.error("a stream ended early: %s", error, exc_info=not isinstance(error, PenstockError))
        fault = fault_of(error)
        running.exchange.error = fault.message
        last = running.reply.failed(fault)
    await send({"type": "http.response.body", "body": last, "more_body": False})
