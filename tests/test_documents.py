"""mask_documents: attention that does not cross an end-of-text token, against a loop over single documents.

It is a property of the trained model (GPTConfig.document_token), so everything that computes the model must compute it.
"""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from folio import UserError
from folio.base.files import read_json
from folio.base.settings import COMMAND_LINE
from folio.checkpoints import foreign, onnx_export
from folio.checkpoints.build_model import model_from_tensors
from folio.checkpoints.export_formats import FORMATS
from folio.data.tokenizer import EOT_TEXT, CharTokenizer, Tokenizer
from folio.decoding import torch_decoder
from folio.decoding.language_model import GenerationConfig, LanguageModel
from folio.decoding.prompts import encode_prompt
from folio.decoding.quantize import quantized
from folio.decoding.sampling import Sampling, next_token_probabilities, sample_token, uniforms
from folio.decoding.scheduler import Completion, Scheduler, generate
from folio.decoding.text_stream import sample_text
from folio.evaluation.extraction import generate_samples
from folio.evaluation.measurement import MeasurementConfig, evaluate_model, load_model
from folio.evaluation.scores import LOSS
from folio.evaluation.text_loss import token_losses
from folio.machine.data_parallel import DataParallelLoss
from folio.machine.kernels import CompiledAttention, FusedAttention, adapt, compiled_attention
from folio.machine.runtime import Runtime
from folio.training.planning.resolve import model_config
from folio.training.planning.resume import merge_checkpoint
from folio.training.setup import build_weights
from folio.web.completions import CompletionAnswer, Limits, read_request, token_text
from folio.web.engine import Engine as BatchEngine
from folio.web.html_file import ENGINE_SCRIPTS
from folio.web.questions import TraceProvider
from folio.web.viewed_model import ViewedModel
from model import GPT, POSITIONS, AttentionKernel, GPTConfig
from prepare import text as prepare_text
from prepare.text import TextConfig
from tests.support.decoding import GREEDY, decoder_in, run_scheduler
from tests.support.engine import engine_in
from tests.support.exports import output_path, read_html, run_export
from tests.support.questions import sample_lines
from tests.support.runs import edit_state
from tests.support.tiny_tokenizers import trained
from tests.support.tolerances import (
    gradients_error,
    logits_error,
    network_operations,
    network_tensors,
    norm_error,
    within,
)
from tests.support.viewed_models import save_run
from train import TrainConfig, train

EOT, V, T = 0, 50, 64
CPU = torch.device("cpu")


def documents(seed: int, rows: int = 4) -> Tensor:
    """Token ids (B, T) of documents of 1 to 29 tokens, each of which ends with EOT, unless it was cut."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(1, V, (rows, T), generator=generator)
    for row in idx:
        lengths = torch.randint(1, 30, (T,), generator=generator).cumsum(0)
        row[lengths[lengths <= T] - 1] = EOT
    return idx


def masked_model(position: str, seed: int, vocab_size: int = V, document_token: int = EOT) -> GPT:
    sizes = dict(block_size=T, vocab_size=vocab_size, n_layer=2, n_head=2, n_embd=32)
    model = GPT(GPTConfig(position=position, document_token=document_token, **sizes), seed)
    for p in model.parameters():  # GPT's small initial weights would hide differences
        torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(seed + p.numel()))
    return model.requires_grad_(False).eval()


def without_mask(model: GPT) -> GPT:
    """The same weights in a model whose attention is not confined."""
    config = replace(model.config, document_token=None)
    return model_from_tensors(config, dict(model.named_parameters())).requires_grad_(False).eval()


def one_by_one(model: GPT, idx: Tensor, eot: int = EOT) -> Tensor:
    """The logits (B, T, V) of documents that are computed alone, without a mask."""
    model, rows = without_mask(model), []
    for row in idx:
        ends = [*((row[:-1] == eot).nonzero().flatten() + 1).tolist(), len(row)]
        rows.append(torch.cat([model.logits(row[None, begin:end])[0] for begin, end in pairwise([0, *ends])]))
    return torch.stack(rows)


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("kernel", [AttentionKernel, FusedAttention])
def test_documents_do_not_see_each_other(position, kernel, seed):
    model, idx = masked_model(position, seed), documents(seed)
    model.kernel = kernel()
    expected = one_by_one(model, idx)
    limit = within(expected, logits_error(model.config, T))
    torch.testing.assert_close(model.logits(idx), expected, **limit)
    assert (without_mask(model).logits(idx) - expected).abs().max() > limit["atol"]


@pytest.mark.parametrize("position", POSITIONS)
def test_the_compiled_kernel_computes_the_same(position, seed):
    """Loss and gradients are as close to float32 as those of matmuls in bfloat16."""
    if not compiled_attention.is_available():
        pytest.skip("this CPU has no AVX-512 BF16")
    sizes = dict(block_size=T, vocab_size=V, n_layer=2, n_head=2, n_embd=64)
    config = GPTConfig(position=position, document_token=EOT, **sizes)
    runtime, model, idx = Runtime(CPU, torch.bfloat16, False, "", workers=2), GPT(config), documents(seed)
    adapt(model, runtime)
    results = []
    for kernel in (FusedAttention, AttentionKernel, CompiledAttention):
        model.kernel = kernel()
        with runtime.autocast() if kernel != FusedAttention else nullcontext():
            loss = model(idx, idx.roll(-1, dims=1))[1]
        loss.backward()
        results.append((loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])))
        model.zero_grad()
    (exact_loss, exact), (_, manual), (loss, compiled_gradients) = results
    logit = 0.02 * math.sqrt(config.n_embd)  # the standard deviation of a new model's logits
    assert loss == pytest.approx(exact_loss, abs=norm_error(network_tensors(config), torch.bfloat16) * logit)
    errors = [((g - exact).norm() / exact.norm()).item() for g in (manual, compiled_gradients)]
    assert errors[1] < 1.2 * errors[0]  # it rounds no more tensors, and errors of so many values vary by a few percent
    assert errors[0] < gradients_error(config, 4, T, torch.bfloat16)


def test_workers_confine_attention_too(seed):
    model, idx = masked_model("learned", seed).requires_grad_(True), documents(seed)
    loss_fn, targets = DataParallelLoss(model, Runtime(CPU, torch.float32, False, "", workers=2)), idx.roll(-1, dims=1)
    logits = one_by_one(model, idx)
    error = within(logits, logits_error(model.config, T))["atol"]
    torch.testing.assert_close(loss_fn.logits(idx), logits, rtol=0, atol=error)
    torch.testing.assert_close(
        loss_fn(idx, targets), model(idx, targets)[1], rtol=0, atol=2 * error
    )  # log-sum-exp, too


@pytest.mark.parametrize("token", [-1, V, True, 1.0, "0"])
def test_the_document_token_must_be_in_the_vocabulary(token):
    with pytest.raises(ValueError, match=f"document_token={token!r}: .* below vocab_size={V}"):
        GPTConfig(vocab_size=V, document_token=token)


# --- sampling ---------------------------------------------------------------------------------------------------------


def expected_text(
    model: GPT, prompt: list[int], tokens: int, eot: int = EOT, sampling: Sampling = GREEDY, sample: int = 0
) -> list[int]:
    """The sampled tokens: each document is computed alone, and begins after the end of the previous one."""
    model, text, numbers = without_mask(model), list(prompt), uniforms(1337, [sample], 0, tokens)  # (1, tokens)
    for t in range(tokens):
        begin = len(text) - next((n for n, id in enumerate(reversed(text[:-1]), 1) if id == eot), len(text))
        probabilities = next_token_probabilities(model(torch.tensor([text[begin:]]))[0][:, -1], sampling)
        text.append(int(sample_token(probabilities, numbers[:, t : t + 1])))
    return text[len(prompt) :]


PROMPTS = [[EOT], [5, 6, EOT], [5, EOT, 6, EOT], [EOT, EOT], [5, EOT, 7, 8], [EOT, 9], [3, 4]]


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("dtype, ahead", [("float32", 0), ("torch float32", 0), ("torch float32", 1)])
def test_sampling_computes_each_document_alone(dtype, ahead, position, seed, monkeypatch):
    """Samples attended to the end-of-text token before them, at positions that were shifted by one or more.

    In a batch, with prompts that contain or end with the token, and with a bias that makes it likely (no `eot` ends the
    text). GPT.generate computes the same most likely tokens.
    """
    monkeypatch.setattr(torch_decoder, "STEPS_AHEAD", {"cpu": ahead})
    model, count = masked_model(position, seed), 10
    for sampling in (GREEDY, Sampling(logit_bias=((EOT, 4.0),))):
        expected = [expected_text(model, prompt, count, EOT, sampling, row) for row, prompt in enumerate(PROMPTS)]
        steps = list(generate(decoder_in(dtype, model), PROMPTS, max_new_tokens=count, sampling=sampling))
        actual = [[step.tokens[row] for step in steps if step.tokens[row] is not None] for row in range(len(PROMPTS))]
        assert actual == expected
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            if sampling == GREEDY:
                assert model.generate(torch.tensor([prompt]), count, top_k=1)[0].tolist() == prompt + tokens
    assert 0 < sum(tokens.count(EOT) for tokens in expected) < count * len(PROMPTS)


@pytest.mark.parametrize("stride", [None, 1, 5, T])
@pytest.mark.parametrize("dtype, ahead", [("float32", 0), ("torch float32", 1)])
def test_a_full_context_slides_within_a_document(dtype, ahead, stride, seed, monkeypatch):
    """A document that follows others has as much room as the first one, and its context slides as that of a prompt."""
    monkeypatch.setattr(torch_decoder, "STEPS_AHEAD", {"cpu": ahead})
    model, count = masked_model("learned", seed), 3 * T
    model.transformer.wte.weight[EOT] = 0.0
    prompts = [[5, EOT, 6, 7], [5, 6, EOT], [EOT, *range(1, 40), EOT, *range(2, 40), *range(3, 40)]]
    sampling = Sampling(temperature=0, logit_bias=((EOT, -100.0),))
    run = partial(generate, decoder_in(dtype, model), sampling=sampling, stride=stride)
    steps = list(run(prompts, max_new_tokens=count))
    for row, prompt in enumerate(prompts):
        tokens = [step.tokens[row] for step in steps if step.tokens[row] is not None]
        if prompt[-1] == EOT:  # its first token comes from the document before; then it is a prompt of one token
            begin = tokens[:1]
            assert begin == expected_text(model, prompt, 1)
        else:
            begin = prompt[-prompt[::-1].index(EOT) :]
        alone = [step.tokens[0] for step in run([begin], max_new_tokens=count) if step.tokens[0] is not None]
        assert tokens[len(begin) if prompt[-1] == EOT else 0 :] == alone[: count - (prompt[-1] == EOT)]


# --- everything that computes the model -------------------------------------------------------------------------------

CHARACTERS = CharTokenizer("\nabcdefghijklmnop", eot=True)
TEXT = f"abc\nab{EOT_TEXT}\nponm{EOT_TEXT}{EOT_TEXT}gfedcbaaaa\n"
IDS = encode_prompt(CHARACTERS, TEXT).ids


def losses(logits: Tensor, ids: list[int]) -> np.ndarray:
    """The loss of each of the ids except the first. logits: (T, V)."""
    return F.cross_entropy(logits[:-1].float(), torch.tensor(ids)[1:], reduction="none").numpy()


def expected_losses(model: GPT, dtype: torch.dtype) -> tuple[np.ndarray, float]:
    """The losses of IDS, of documents that are computed alone, and a bound on the norm of their error in a dtype.

    A token's logits have independent errors, and their log-sum-exp a mean of them, which is much smaller.
    """
    logits, config = one_by_one(model, torch.tensor([IDS]), CHARACTERS.eot)[0], model.config  # (T, V)
    roundings = network_operations(config, len(IDS)) if dtype == torch.float32 else network_tensors(config)
    return losses(logits, IDS), norm_error(roundings, dtype) * logits.norm().item() / math.sqrt(config.vocab_size)


def save_masked_run(folder: Path, position: str, tokenizer: Tokenizer = CHARACTERS) -> GPT:
    """Save step 100 and the snapshot of step 50 of a run with mask_documents, and return its model."""
    model = masked_model(position, 3, tokenizer.vocab_size, tokenizer.eot)
    save_run(folder, {100: model}, tokenizer, {50: model}, {"mask_documents": True})
    edit_state(folder / "step-000100", lambda state: state["dataset"].update(folder="texts"))
    return model


def decoded(run: str, dtype: str) -> np.ndarray:
    gpt = LanguageModel.load(run, device="cpu", dtype=dtype)
    completions = [Completion(IDS[:n], GREEDY, 1, logprobs=gpt.model.config.vocab_size) for n in range(1, len(IDS))]
    run_scheduler(Scheduler(gpt.decoder, rows=4), *completions)
    predictions = [dict(completion.token_logprobs[0].top) for completion in completions]
    return np.array([-logprobs[token] for logprobs, token in zip(predictions, IDS[1:], strict=True)])


def decoded_with_torch(run: str) -> np.ndarray:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("folio.decoding.cpu_decoder.unsupported_reason", lambda model: "a test")
        return decoded(run, "float32")


def served(run: str) -> np.ndarray:
    gpt = LanguageModel.load(run, device="cpu", dtype="float32")
    prompts, bias = [IDS[:n] for n in range(1, len(IDS))], {str(gpt.tokenizer.eot): -100}  # else, no token is scored
    body = {"prompt": prompts, "max_tokens": 1, "logprobs": 20, "logit_bias": bias}
    request = read_request(body, gpt, Limits())
    (answer,) = sample_lines(BatchEngine(gpt, rows=2), CompletionAnswer(request, "run", "", gpt.tokenizer))
    predictions = [choice["logprobs"]["top_logprobs"][0] for choice in answer["choices"]]
    names = [token_text(token, gpt.tokenizer) for token in IDS[1:]]
    return np.array([-logprobs[name] for logprobs, name in zip(predictions, names, strict=True)])


def viewed(run: str, step: int | None = None) -> np.ndarray:
    provider = TraceProvider([ViewedModel(run, "best", CPU)], "")
    return provider.answer({"kind": "overview", "ids": IDS, "step": step}).tensors["loss"].numpy()


def evaluated(run: str) -> np.ndarray:
    loaded = load_model(run, MeasurementConfig(device="cpu", dtype="float32"))
    return token_losses(loaded.model, np.array(IDS), loaded.runtime, stride=T)


def finetuned(run: str) -> np.ndarray:
    draft = merge_checkpoint(TrainConfig(init_from=run, out_dir=f"{run}-2"), [])
    config = model_config(draft.cfg, draft.weights, SimpleNamespace(tokenizer=CHARACTERS))
    model = build_weights(draft.weights, config, draft.cfg)
    return losses(model.eval().logits(torch.tensor([IDS]))[0].detach(), IDS)


WAYS = {
    **{dtype: partial(decoded, dtype=dtype) for dtype in ("float32", "bfloat16", "int8", "int4")},
    "torch": decoded_with_torch,
    "server": served,
    "viewer": viewed,
    "viewer, snapshot": partial(viewed, step=50),
    "evaluate": evaluated,
    "finetuning": finetuned,
}


@pytest.mark.parametrize("position", ["learned", "rotary"])
@pytest.mark.parametrize("way", WAYS)
def test_the_loss_of_several_documents_is_that_of_training(way, position, tmp_path):
    """Everything except train.py and evaluate.py computed it without the mask: 0.94 nats instead of 0.46."""
    model = save_masked_run(tmp_path / "run", position)
    if way in ("int8", "int4"):
        model = quantized(model, way)
    expected, error = expected_losses(model, torch.bfloat16 if way in ("bfloat16", "int8", "int4") else torch.float32)
    idx, targets = torch.tensor([IDS[:-1]]), torch.tensor([IDS[1:]])
    assert abs(model(idx, targets)[1].item() - expected.mean()) < error
    assert np.linalg.norm(WAYS[way](str(tmp_path / "run")) - expected) < error
    unmasked = losses(without_mask(model).logits(torch.tensor([IDS]))[0], IDS)
    assert np.linalg.norm(unmasked - expected) > 2 * error


def test_the_viewer_shows_the_position_in_the_document(tmp_path):
    """The embedding of the position in the text was shown, which is not in the residual stream."""
    save_masked_run(tmp_path / "run", "learned")
    provider = TraceProvider([ViewedModel(str(tmp_path / "run"), "best", CPU)], "")
    for token in range(len(IDS)):
        tensors = provider.answer({"kind": "token", "ids": IDS, "token": token}).tensors
        assert torch.equal(tensors["embedding"] + tensors["position"], tensors["states"][0])


def test_samples_without_a_prompt_are_those_of_training(tmp_path):
    """In training, in sample.py, and of tools/memorized.py: from the end-of-text token, and then from position 0."""
    model = save_masked_run(tmp_path / "run", "learned")
    model.transformer.wte.weight[CHARACTERS.eot] = 0.0  # so that documents are long
    gpt = LanguageModel(model, CHARACTERS, "cpu", "float32")
    config = GenerationConfig(max_new_tokens=40, temperature=0)
    expected = expected_text(model, [CHARACTERS.eot], 40, CHARACTERS.eot)
    assert expected != expected_text(without_mask(model), [CHARACTERS.eot], 40, eot=-1)
    assert [sample.tolist() for sample in generate_samples(gpt, 2, config)] == [expected] * 2
    assert gpt.generate("", max_new_tokens=40, temperature=0) == CHARACTERS.decode(expected)
    settings = dict(max_new_tokens=40, temperature=0.8, top_k=None, seed=5)
    assert "".join(sample_text(model, CHARACTERS, gpt.runtime, 5, 40)) == gpt.generate("", **settings)


@pytest.mark.architecture("folio/web/browser, which computes GPT-2's architecture only")
@pytest.mark.parametrize("position", ["learned", "rotary", "alibi"])
def test_an_html_file_computes_the_loss_of_training(position, browser, tmp_path):
    model = save_masked_run(tmp_path / "run", position)
    run_export("--to=html", tmp_path / "run", tmp_path / "model.html", "--dtype=float32", f"--text={TEXT}")
    file = read_html(tmp_path / "model.html")
    script = """(async () => {
      globalThis.host = new EngineHost(() => 0);
      host.gpt = new GPT(header, await makeKernels(null));
      finish(host.gpt.setWeights(weights));
      const answers = new Answers(host.gpt, makeTokenizer(header.tokenizer), header);
      return [finish(answers.answer({kind: "overview", ids})).tensors.loss.data, finish(host.difference(header.check))];
    })()"""
    with engine_in(browser, *ENGINE_SCRIPTS) as engine:
        actual, difference = engine(f"await {script}", header=file.header, weights=file.weights.content, ids=IDS)
    expected, error = expected_losses(model, torch.float32)
    assert np.linalg.norm(actual - expected) < error
    assert difference < error


@pytest.mark.architecture("folio/checkpoints/export_formats.py, which writes GPT-2's weights only")
@pytest.mark.needs("transformers", "gguf", "onnx", "onnxruntime", "onnxscript")
@pytest.mark.parametrize("to", [*FORMATS, pytest.param("onnx", marks=pytest.mark.slow)])
def test_an_export_without_the_mask_is_exact_for_one_document_and_says_so(to, tmp_path, capsys):
    """The check failed, or passed on text that a user does not have; bos_token put the token before each text."""
    tokenizer = trained() if to == "gguf" else CHARACTERS
    model = save_masked_run(tmp_path / "run", "learned", tokenizer=tokenizer)
    output = tmp_path / "exported" if to == "onnx" else output_path(tmp_path, to)
    run_export(f"--to={to}", tmp_path / "run", output)
    assert "mask_documents=True: attention does not cross" in capsys.readouterr().out
    exported = onnx_export.open_with_onnxruntime(output) if to == "onnx" else FORMATS[to].open(output)
    (ids,) = torch.tensor([tokenizer.encode("hello" if to == "gguf" else "abcponmaa").tolist()])
    if to == "nanogpt":  # which computes the exact GELU
        model = model_from_tensors(replace(model.config, activation="gelu"), dict(model.named_parameters())).eval()
    expected = model.logits(ids[None]).detach()
    tolerance = within(expected, logits_error(model.config, T))
    torch.testing.assert_close(exported.logits(ids[None]), expected, **tolerance)
    if to in ("hf", "onnx"):
        assert read_json(output / "config.json").get("bos_token_id") is None
        assert read_json(output / "tokenizer_config.json").get("bos_token") is None
    if to == "gguf":
        assert b"tokenizer.ggml.bos_token_id" not in output.read_bytes()
    if to == "hf":
        assert "mask_documents=True" in (output / "README.md").read_text()


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def short_texts(tmp_path) -> str:
    """A folder with the data sets "texts", of short documents, and "more", with the same tokenizer."""
    for name, tokenizer in (("texts", "char"), ("more", str(tmp_path / "data" / "texts"))):
        rows = [json.dumps({"text": "abcdef"[n % 5 :] * (1 + n % 3)}) + "\n" for n in range(400)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
        inputs = (str(tmp_path / f"{name}.jsonl"),)
        prepare_text.main(TextConfig(inputs=inputs, name=name, tokenizer=tokenizer, data_dir=str(tmp_path / "data")))
    return str(tmp_path / "data")


def test_a_run_records_the_document_token_and_finetuning_keeps_the_mask(tiny, short_texts, tmp_path, capsys):
    small = dict(dataset="texts", data_dir=short_texts, max_iters=4, eval_interval=4, eval_iters=None, dropout=0.0)
    train(tiny(**small, mask_documents=True, out_dir=str(tmp_path / "masked")))
    saved = foreign.load(str(tmp_path / "masked"), "last")
    assert saved.config().document_token == saved.tokenizer.eot == saved.state["model"]["document_token"]
    measures = evaluate_model(str(tmp_path / "masked"), MeasurementConfig(device="cpu", dtype="float32")).measures
    (loss,) = [measure.ratio for measure in measures if measure.name == LOSS]
    # The logits of a new model are smaller than its loss.
    assert loss == pytest.approx(saved.state["best_val_loss"], rel=2 * logits_error(saved.config(), T))
    capsys.readouterr()
    small |= dict(dataset="more", init_from=str(tmp_path / "masked"))
    for changes, masked, words in (({}, True, "as the"), ({"mask_documents": False}, False, "but the")):
        cfg = tiny(**small, out_dir=str(tmp_path / f"{masked}"))
        train(cfg.replace(dict.fromkeys(changes, COMMAND_LINE), **changes))
        assert f"mask_documents={masked}, {words} weights were trained" in capsys.readouterr().out
        finetuned = foreign.load(str(tmp_path / f"{masked}"), "last")
        assert (finetuned.config().document_token is not None) == finetuned.settings()["mask_documents"] == masked


def test_data_without_the_token_is_an_error(tiny):
    with pytest.raises(UserError, match="mask_documents=True: the data is one text"):
        train(tiny(mask_documents=True))
