"""An OpenAI-compatible server for one model. Completions can be streamed; many requests are generated at a time.

    GET  /v1/models, /v1/models/ID      the model
    POST /v1/completions                text completions
    POST /v1/chat/completions           for models trained on chats or pairs; 404 otherwise
    GET  /health                        number of rows in use; needs no key

docs/use/serving.md is the documentation. The protocol is in folio/web/completions.py, the fields that it accepts or
refuses in folio/web/unused_fields.py, batching in folio/web/engine.py, and streaming in folio/web/streaming.py.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from folio.data.shards import PromptFormat
from folio.decoding.language_model import LanguageModel
from folio.web import completions, server
from folio.web.completions import ChatAnswer, CompletionAnswer, Limits, error_content
from folio.web.engine import Engine
from folio.web.server import OriginCheck, RequestError, json_response, read_json
from folio.web.streaming import GenerationResponse, Responses


@dataclass(eq=False)
class ServedModel:
    """The served model, its public name and limits, and the responses in progress."""

    engine: Engine
    model_id: str
    fingerprint: str  # hash of the checkpoint
    limits: Limits = field(default_factory=Limits)
    timeout: float = 600.0  # seconds per request
    created: int = field(default_factory=lambda: int(time.time()))

    responses: Responses = field(default_factory=Responses)

    @property
    def gpt(self) -> LanguageModel:
        return self.engine.gpt

    async def respond(self, request: Request, chat: PromptFormat | None) -> GenerationResponse:
        """Answer a request of /v1/completions or /v1/chat/completions."""
        body = await read_json(request)
        self.check_model(body.get("model") if isinstance(body, dict) else None)
        parsed = await run_in_threadpool(completions.read_request, body, self.gpt, self.limits, chat)
        answer_type = ChatAnswer if chat else CompletionAnswer
        answer = answer_type(parsed, self.model_id, self.fingerprint, self.gpt.tokenizer)
        return GenerationResponse(self.responses, self.engine, answer, self.timeout)

    def check_model(self, name: Any) -> None:
        if name is not None and not isinstance(name, str):
            raise RequestError("model must be a string", "model")
        if name not in (None, self.model_id):
            message = f"model {name[:100]!r} does not exist; GET /v1/models lists the model of this server"
            raise RequestError(message, "model", "model_not_found", 404)

    def describe(self) -> dict[str, Any]:
        """Return the model object of /v1/models."""
        info = {"id": self.model_id, "object": "model", "created": self.created, "owned_by": "folio"}
        return {**info, "max_model_len": self.gpt.model.config.block_size}


# --- routes -----------------------------------------------------------------------------------------------------------


def make_app(
    served: ServedModel, hosts: frozenset[str], origins: frozenset[str] = frozenset(), key: str | None = None
) -> OriginCheck:
    """Build the application. Its shutdown closes the engine. hosts, origins, key: see server.make_app."""

    async def health(request: Request) -> Response:
        engine = served.engine
        counts = {"rows": engine.rows, "active": engine.active, "waiting": engine.waiting}
        return json_response({"status": "ok", **counts})

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [served.describe()]})

    async def model(request: Request) -> Response:
        served.check_model(request.path_params["name"])
        return json_response(served.describe())

    async def complete(request: Request) -> GenerationResponse:
        return await served.respond(request, None)

    async def chat(request: Request) -> GenerationResponse:
        if served.gpt.prompt_format is None:
            message = "this model was not trained on chats; use /v1/completions"
            raise RequestError(message, code="chat_not_supported", status=404)
        return await served.respond(request, served.gpt.prompt_format)

    post = ["POST"]
    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/completions", complete, methods=post),
        Route("/v1/chat/completions", chat, methods=post),
    ]
    return server.make_app(routes, error_content, hosts, origins, key, close=served.engine.close)
