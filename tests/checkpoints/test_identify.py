"""What a path is that is given as a model, in errors of all commands that load one."""

import os
from pathlib import Path

import pytest

from folio import UserError
from folio.base import settings
from folio.checkpoints import checkpoint, foreign
from folio.checkpoints.identify import HUB, NoCheckpointError, identify
from folio.decoding.language_model import LanguageModel
from sample import SampleConfig
from sample import main as sample
from tests.support.checkpoints import save
from tools import compare, evaluate, export, memorized, serve, view
from train import train


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(*names: str) -> None:
    """Create empty files."""
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()


def test_a_missing_checkpoint_is_an_error_that_names_the_newest_runs():
    """The runs in the same folder, or the run that would contain the checkpoint."""
    Path("out").mkdir()
    with pytest.raises(NoCheckpointError, match=r"^out .*train one first: python train\.py config/"):
        checkpoint.load(Path("out"))
    for age, run in enumerate(["b", "d", "a", "c"]):
        os.utime(save(Path(run), 1), (1e9 - age, 1e9 - age))
    for path in ("out", "missing", "out-gpt2-xl", "my-gpt2", "gpt2-run"):
        with pytest.raises(NoCheckpointError, match=f"^{path} .*: try b or d or a$"):
            checkpoint.load(Path(path))
    with pytest.raises(NoCheckpointError, match=r"^a.step-000002 .*: try a$"):
        checkpoint.load(Path("a", "step-000002"))
    assert str(NoCheckpointError(Path("out"), "--out_dir=")).endswith("or --out_dir=a")


@pytest.mark.parametrize(
    "files, path, format",
    [
        ("out/step-000001/manifest.json", "out", "run"),
        ("out/step-000001/manifest.json", "out/step-000001", "run"),
        ("hf/config.json hf/model.safetensors hf/onnx/model.onnx", "hf", "hugging_face"),
        ("hf/config.json hf/pytorch_model-1.bin hf/model.onnx hf/tf_model.h5", "hf", "hugging_face"),
        ("hf/config.json hf/model.safetensors hf/adapter_config.json", "hf", "hugging_face"),
        ("hf/config.json", "hf", "hugging_face"),
        ("nano/ckpt.pt", "nano", "nanogpt"),
        ("nano/ckpt.pt nano/last.json nano/step-000001/manifest.json", "nano", "run"),
        ("other.pt", "other.pt", "nanogpt"),
        ("model.gguf", "model.gguf", "gguf"),
        ("", "gpt2-medium", "hub"),
    ],
)
def test_what_folio_loads(files, path, format):
    write(*files.split())
    assert identify(Path(path)).format == format


NOT_LOADED = [  # files, the path that is named, the start of the message, and a part of its remedy
    ("lora/adapter_config.json lora/adapter_model.safetensors lora/tokenizer.json", "lora", "an adapter", "merge"),
    ("lora/adapter_model.bin", "lora/adapter_model.bin", "an adapter", "merge"),
    ("model.safetensors", "model.safetensors", "weights without a config.json", "with both"),
    ("w/model.safetensors", "w", "weights without a config.json", "with both"),
    ("w/pytorch_model.bin w/tokenizer.json", "w", "weights without a config.json", "with both"),
    ("hf/config.json hf/model.safetensors", "hf/model.safetensors", "a file of a folder of tr", "the folder, hf"),
    ("out/step-000001/manifest.json out/last.json", "out/last.json", "a file of a run", "name the folder, out"),
    ("epoch=3.ckpt", "epoch=3.ckpt", "a checkpoint of PyTorch Lightning", "save_pretrained"),
    ("net.pth", "net.pth", "a checkpoint of PyTorch Lightning or another", "rename the file to ckpt.pt"),
    ("onnx/config.json onnx/model.onnx onnx/tokenizer.json", "onnx", "an exported model", "name the run"),
    ("model.onnx", "model.onnx", "an exported model", "name the run"),
    ("model.html", "model.html", "an exported model", "name the run"),
    ("tf/config.json tf/tf_model.h5 tf/vocab.json", "tf", "a model of TensorFlow or JAX", "save_pretrained"),
    ("124M/hparams.json 124M/encoder.json", "124M", "a model of Tens", "gpt2, gpt2-medium"),
    ("out.tar.gz", "out.tar.gz", "an archive", "unpack it"),
    ("tok/tokenizer.json tok/special.json", "tok", "a tokenizer without a model", "config.json and model"),
    ("data/x/meta.json data/x/train-0.bin", "data/x", "a data set", r"train\.py --dataset=data/x"),
    ("data/x/train.bin data/x/val.bin", "data/x", "a data set", r"train\.py --dataset=data/x"),
    ("new/metrics.jsonl", "new", "a run without a checkpoint", "first evaluation"),
    ("", "openai-community/gpt2", "neither a path nor a model", r"use gpt2 \(or gpt2-medium"),
    ("", "gpt2-mediun", "neither a path nor a model", r"use gpt2-medium \(or gpt2,"),
    ("", "EleutherAI/gpt-neo-125m", "neither a path nor", "hf download .* --local-dir gpt-neo-125m"),
]


@pytest.mark.parametrize("files, path, what, remedy", NOT_LOADED)
def test_what_folio_does_not_load_is_named_with_a_remedy(files, path, what, remedy):
    """The message was "holds no checkpoint: train one first", or named another run."""
    write(*files.split())
    save(Path("other-run"), 1)
    for load in (foreign.load, lambda name: checkpoint.load(Path(name))):
        with pytest.raises(UserError, match=rf"^{path} is {what}[^\n]*: [^\n]*{remedy}[^\n]*$"):
            load(path)


def test_models_in_a_folder_are_proposed_the_newest_first():
    """The output_dir of transformers' Trainer, the hub's cache, and a folder of runs proposed other runs or none."""
    for step in (500, 1000, 1500, 2000):
        folder = f"trained/checkpoint-{step}"
        write(f"{folder}/config.json", f"{folder}/model.safetensors", f"{folder}/optimizer.pt")
    hub = "models--gpt2/snapshots/abc"
    write("models--gpt2/refs/main", f"{hub}/config.json", f"{hub}/model.safetensors")
    save(Path("runs/a"), 1)
    steps = " or ".join(f"trained/checkpoint-{step}" for step in (2000, 1500, 1000))
    assert str(NoCheckpointError(Path("trained"))) == f"trained holds no checkpoint: try {steps}"
    with_setting = str(NoCheckpointError(Path("trained"), "--out_dir="))
    assert "try --init_from=trained/checkpoint-2000 or --init_from=" in with_setting
    assert str(NoCheckpointError(Path("models--gpt2"))).endswith(f": try {hub}")
    assert str(NoCheckpointError(Path("runs"), "--out_dir=")).endswith(": try --out_dir=runs/a")


def test_a_folder_of_adapters_or_of_lightning_is_named():
    write("trained/checkpoint-1/adapter_config.json", "trained/checkpoint-2/adapter_config.json")
    write("logs/version_0/checkpoints/epoch=0-step=9.ckpt", "logs/version_0/hparams.yaml")
    assert "checkpoint: trained/checkpoint-2 is an adapter" in str(NoCheckpointError(Path("trained")))
    assert "logs/version_0/checkpoints is a checkpoint of PyTorch Lightning" in str(NoCheckpointError(Path("logs")))


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files, path, message",
    [
        ("out-nano/ckpt.pt", "out-nano", "is nanoGPT's out_dir.* --init_from=out-nano and another --out_dir$"),
        ("hf/config.json hf/model.safetensors", "hf", "is a folder of tran.* --init_from=hf and another --out_dir$"),
        ("", "gpt2", "is a model on the.* --init_from=gpt2 and another --out_dir$"),
        ("new/checkpoint-5/config.json new/checkpoint-5/model.safetensors", "new", "try --init_from=new/checkpoint-5$"),
    ],
)
def test_resuming_weights_of_another_program_names_init_from(files, path, message, tiny):
    """It said "train one first" about nanoGPT's out_dir, and about a folder of transformers."""
    write(*files.split())
    with pytest.raises(UserError, match=f"^{path} .*{message}"):
        train(tiny(init_from="resume", out_dir=path))


@pytest.mark.needs("transformers", "scipy")
def test_every_command_says_what_a_path_is(tiny):
    write("lora/adapter_config.json")
    commands = [
        lambda: train(tiny(init_from="lora", out_dir="new")),
        lambda: train(tiny(init_from="resume", out_dir="lora")),
        lambda: sample(SampleConfig(out_dir="lora")),
        lambda: sample(SampleConfig(init_from="lora")),
        lambda: LanguageModel.load("lora"),
        lambda: view.main(view.ViewConfig(models=("lora",))),
        lambda: serve.main(serve.ServeConfig(models=("lora",))),
        lambda: export.main(export.ExportConfig(paths=("lora", "exported"))),
        lambda: evaluate.main(settings.load(evaluate.EvaluateConfig, ["lora"])),
        lambda: compare.main(settings.load(compare.CompareConfig, ["lora", "gpt2"])),
        lambda: memorized.main(settings.load(memorized.MemorizedConfig, ["lora"])),
    ]
    for command in commands:
        with pytest.raises(NoCheckpointError, match=r"^lora is an adapter \(LoRA, PEFT\).*: merge"):
            command()


def test_the_names_of_the_hub_are_those_of_nanogpt():
    assert [*HUB] == ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2"]
