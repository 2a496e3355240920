"""Helpers for the viewer's questions and answers, and invalid questions."""

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

MISTAKES = [  # (question, fragment of the error message)
    (None, "JSON object"),
    ([], "JSON object"),
    ({}, "kind='': it must be one of models, tokens"),
    ({"kind": ["head"]}, "kind="),
    ({"kind": "head", "layer": "1"}, "layer='1'"),
    ({"kind": "head", "layer": -1}, "layer=-1"),
    ({"kind": "head", "model": 1}, "model=1: it must be less than 1"),
    ({"kind": "head"}, "ids must contain at least one token"),
    ({"kind": "head", "ids": 5}, "ids must be a list of token ids from 0 to"),
    ({"kind": "head", "ids": [True]}, "ids must be"),
    ({"kind": "head", "ids": [-1]}, "ids must be"),
    ({"kind": "head", "ids": [10**30]}, "ids must be"),
    ({"kind": "head", "ids": [1] * 49}, "the limit is 48"),
    ({"kind": "head", "ids": [1], "layer": 2}, "must be less than 2, 4, and 1"),
    ({"kind": "head", "ids": [1], "head": 4}, "must be less than"),
    ({"kind": "token", "ids": [1], "token": 1}, "must be less than"),
    ({"kind": "machine", "ids": [1, 2], "first": 1}, "first=1: it must be at most token=0"),
    ({"kind": "machine", "ids": [1, 2], "token": 2}, "must be less than 2, 4, and 2"),
    ({"kind": "machine", "ids": [1], "first": -1}, "first=-1"),
    ({"kind": "head", "ids": [1], "mask": "on"}, "mask='on'"),
    ({"kind": "head", "ids": [1], "heads_off": "1"}, "heads_off must be"),
    ({"kind": "head", "ids": [1], "heads_off": "1.4"}, "the model has 2 layers of 4 heads"),
    ({"kind": "head", "ids": [1], "mlps_off": "-1"}, "the model has 2 layers of 4 heads"),
    ({"kind": "head", "ids": [1], "scale": 1}, "scale=1"),
    ({"kind": "head", "model": 0.5}, "model=0.5"),
    ({"kind": "overview", "ids": [1], "step": 7}, "has no checkpoint of step 7"),
    ({"kind": "overview", "ids": [1], "step": "../../char"}, "step='../../char'"),
    ({"kind": "parameter", "name": "../../../etc/passwd"}, "it is not a parameter"),
    ({"kind": "parameter", "name": "transformer.wte.weight", "row": 99}, "row=99"),
    ({"kind": "vocabulary", "row": 99}, "row=99"),
    ({"kind": "tokens", "text": 5}, "text=5"),
    ({"kind": "tokens", "text": "a" * 100_001}, "text: it has 100,001 characters"),
]


def read(content: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """Parse the bytes of an answer into facts and tensors. See Answer.to_bytes in folio/web/questions.py."""
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
    """Return the JSON lines of a response to /generate."""
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
    """Return the entries of each sample, without null."""
    by_sample = zip(*(event["samples"] for event in events if "samples" in event), strict=True)
    return [[entry for entry in entries if entry] for entries in by_sample]


def texts_of(events: list[dict]) -> list[str]:
    """Return the text of each sample."""
    return ["".join(entry[1] for entry in entries) for entries in entries_of(events)]
