"""Reading the viewer's answers, and invalid questions."""

import asyncio
import json
import math
import struct
from typing import Any

import numpy as np

from folio.web.engine import Engine
from folio.web.playground import SampleLines
from folio.web.questions import TraceProvider
from folio.web.streaming import GenerationResponse, Responses
from tests.support.waiting import in_thread

MISTAKES = [  # a question, and what its error says
    (None, "a question is a JSON object"),
    ([], "a question is a JSON object"),
    ({}, "kind='': it is none of models, tokens"),
    ({"kind": "heads"}, "kind='heads': it is none of"),
    ({"kind": ["head"]}, "kind="),
    ({"kind": "head", "layer": "1"}, "layer='1': it takes"),
    ({"kind": "head", "layer": -1}, "layer=-1: it must be at least 0"),
    ({"kind": "head", "model": 1}, "model=1: there are 1"),
    ({"kind": "head"}, "ids: there must be at least one token"),
    ({"kind": "head", "ids": 5}, "ids: it takes a list of token ids from 0 to"),
    ({"kind": "head", "ids": [1.0]}, "ids: it takes"),
    ({"kind": "head", "ids": [True]}, "ids: it takes"),
    ({"kind": "head", "ids": [-1]}, "ids: it takes"),
    ({"kind": "head", "ids": [10**30]}, "ids: it takes"),
    ({"kind": "head", "ids": ["1"]}, "ids: it takes"),
    ({"kind": "head", "ids": {"0": 1}}, "ids: it takes"),
    ({"kind": "head", "ids": [1] * 49}, "ids: 49 tokens are more than 48"),
    ({"kind": "head", "ids": [1], "layer": 2}, "there are 2 layers, 4 heads, and 1 tokens"),
    ({"kind": "head", "ids": [1], "head": 4}, "there are 2 layers"),
    ({"kind": "token", "ids": [1], "token": 1}, "there are 2 layers"),
    ({"kind": "head", "ids": [1], "mask": "on"}, "mask='on': it takes"),
    ({"kind": "head", "ids": [1], "heads_off": "1"}, "heads_off takes LAYER.HEAD"),
    ({"kind": "head", "ids": [1], "heads_off": "1.4"}, "the model has 2 layers of 4 heads"),
    ({"kind": "head", "ids": [1], "mlps_off": "a"}, "heads_off takes LAYER.HEAD, and mlps_off layers"),
    ({"kind": "head", "ids": [1], "mlps_off": "-1"}, "the model has 2 layers of 4 heads"),
    ({"kind": "head", "ids": [1], "scale": 1}, "scale=1: it takes"),
    ({"kind": "head", "model": 0.5}, "model=0.5: it takes"),
    ({"kind": "overview", "ids": [1], "step": 7}, "has no checkpoint of step 7"),
    ({"kind": "overview", "ids": [1], "step": "../../char"}, "step='../../char': it takes"),
    ({"kind": "parameter", "name": "../../../etc/passwd"}, "it is not a parameter"),
    ({"kind": "parameter", "name": "wte"}, "name='wte': it is not a parameter"),
    ({"kind": "parameter", "name": "transformer.wte.weight", "row": 99}, "row=99: transformer.wte.weight has"),
    ({"kind": "vocabulary", "row": 99}, "row=99: there are"),
    ({"kind": "tokens", "text": 5}, "text=5: it takes"),
    ({"kind": "tokens", "text": "a" * 100_001}, "text: it has 100,001 characters"),
]


def read(content: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """The facts and tensors in the bytes of an answer, in the format described in folio/web/questions.py."""
    (length,) = struct.unpack_from("<I", content)
    facts = json.loads(content[4 : 4 + length])
    tensors, offset = {}, 4 + length
    for name, kind in facts.pop("tensors").items():
        dtype = np.dtype({"float32": "<f4", "int32": "<i4", "uint8": "u1"}[kind["dtype"]])
        count = math.prod(kind["shape"])
        assert offset % 4 == 0
        tensors[name] = np.frombuffer(content, dtype, count, offset).reshape(kind["shape"])
        offset += -(-count * dtype.itemsize // 4) * 4
    assert offset == len(content)
    return facts, tensors


def sample_lines(engine: Engine, format: SampleLines) -> list[dict]:
    """The lines that a page receives for a request for samples."""
    sent: list[bytes] = []

    async def receive() -> None:
        await asyncio.Event().wait()

    async def send(message: dict) -> None:
        sent.append(message.get("body", b""))

    in_thread(asyncio.run, GenerationResponse(Responses(), engine, format)({}, receive, send))
    return [json.loads(line) for line in b"".join(sent).splitlines()]


def generate(provider: TraceProvider, **fields: Any) -> list[dict]:
    return sample_lines(*provider.sampler(fields))


def entries_of(events: list[dict]) -> list[list]:
    """The tokens and the end event of each sample."""
    by_sample = zip(*(event["samples"] for event in events if "samples" in event), strict=True)
    return [[entry for entry in entries if entry] for entries in by_sample]
