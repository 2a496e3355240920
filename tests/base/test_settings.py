import contextlib
import io
import os
import pickle
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import pytest

from folio.base import settings
from folio.base.settings import ConfigError, Settings, setting_names
from prepare.text import TextConfig
from sample import SampleConfig
from tests.support.repository import shipped
from tools.verify_resume import VerifyConfig
from train import TrainConfig

CONFIGS = [path for path in shipped() if path.parent.name == "config"]


@dataclass(frozen=True)
class Config(Settings):
    """Settings for the tests."""

    # --- numbers ---
    learning_rate: float = 0.1  # a rate
    max_iters: int = 10  # steps
    #                      in all
    eval_iters: int | None = None  # a cap; None: off
    # --- words ---
    start: str = ""  # a text
    name: str | None = None  # another
    compile: bool | Literal["auto"] = "auto"  # a choice
    dtype: Literal["auto", "float32"] = "auto"
    flag: bool = False  # a switch

    def problems(self) -> list[tuple[str, str]]:
        return [(n, "it must be positive") for n in ("learning_rate", "max_iters") if getattr(self, n) <= 0]


@pytest.mark.parametrize(
    "argument, setting, value",
    [
        ("--learning_rate=1", "learning_rate", 1.0),
        ("--learning_rate=1e-3", "learning_rate", 1e-3),
        ("--max_iters=1e3", "max_iters", 1000),
        ("--max_iters=5_000", "max_iters", 5000),
        ("--eval_iters=None", "eval_iters", None),
        ("--eval_iters=7", "eval_iters", 7),
        ("--compile=false", "compile", False),
        ("--compile=True", "compile", True),
        ("--compile=auto", "compile", "auto"),
        ("--dtype=float32", "dtype", "float32"),
        ("--start=a=b", "start", "a=b"),
        ("--start=", "start", ""),
        ("--start=12", "start", "12"),
        ("--name=123", "name", "123"),
        ("--name=none", "name", None),
        ("--flag=TRUE", "flag", True),
        ("--flag", "flag", True),
        ("--flag false", "flag", False),
        ("--flag --max_iters 5", "flag", True),
        ("--max_iters 5", "max_iters", 5),
        ("--learning_rate -1e-3 --learning_rate 2", "learning_rate", 2.0),
        ("--start -", "start", "-"),
        ("--start=a --name b", "name", "b"),
    ],
)
def test_arguments_are_converted_to_the_type_of_the_setting(argument, setting, value):
    loaded = getattr(settings.load(Config, argument.split()), setting)
    assert loaded == value and type(loaded) is type(value)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--learning_rat=1"], r"command line: learning_rat .*did you mean learning_rate\?"),
        (["--max_iters"], "command line: .*--max_iters=VALUE"),
        (["--max_iters", "--flag"], "command line: .*--max_iters=VALUE"),
        (["--learning_rate", "0"], "command line: learning_rate=0.0: .*positive"),
        (["--config=x.py"], "command line: .*x.py without --config"),
        (["-max_iters=5"], "command line: .*--max_iters=VALUE instead of -max_iters=5"),
        (["config/shakespear_char.py"], "config/shakespear_char.py .*did you mean config/shakes"),
        (["zzzz"], "zzzz .*Folio has config/"),
        (["--learning_rate=1" + 400 * "0"], "command line: learning_rate=10.*a number"),
    ],
)
def test_errors_say_how_to_fix_them(arguments, message):
    with pytest.raises(ConfigError, match=message):
        settings.load(Config, arguments)


def test_a_config_file_holds_assignments_and_arithmetic(write):
    path = write(
        '"""A record."""\n_scratch = 2\n'
        + "max_iters = 4 * 10**2 // _scratch\n"
        + "eval_iters = max_iters / 100\n"
        + "learning_rate: float = 1\n"
        + "start = 'a' + 'b'  # a comment\n"
        + "name = None\n"
        + "flag = not False\n"
    )
    config = settings.load(Config, [path, "--start=c"])
    assert config == Config(learning_rate=1.0, max_iters=200, eval_iters=2, start="c", flag=True)
    assert settings.load(Config, ["--start=c", path]).start == "ab"  # the last argument decides


@pytest.mark.parametrize(
    "content, message",
    [
        ("max_iters = 1\nlerning_rate = 1", r"x.py:2: lerning_rate .*did you mean learning_rate\?"),
        ("import os", "x.py:1: `import os` is not an assignment"),
        ("start = open('f')", r"`open\('f'\)` is not a constant"),
        ("max_iters = steps", "`steps` is not defined above"),
        ("if True:\n    max_iters = 1", "`if True:` is not an assignment"),
        ("max_iters = 'a' - 1", "x.py:1: unsupported operand"),
        ("max_iters[0] = 1", "`max_iters\\[0\\] = 1` is not an assignment"),
        ("max_iters: int", "is not an assignment"),
        ("max_iters = 1 / 0", "division by zero"),
        ("max_iters =", "x.py:1: .*not Python"),
        ("\n\nmax_iters = 0", "x.py:3: max_iters=0: .*positive"),
        ("max_iters = 5\nflag = True\nmax_iters = 6", "x.py:3: line 1 also sets max_iters; remove one of the two$"),
        ("max_iters = max_iters = 5", "x.py:1: line 1 also sets max_iters"),
    ],
)
def test_errors_in_a_config_file_name_the_line(write, content, message):
    with pytest.raises(ConfigError, match=message):
        settings.load(Config, [write(content)])


@pytest.mark.parametrize(
    "expression",
    [
        *("().__class__.__bases__", "[1, 2][0]", "(lambda: 1)()", "[x for x in 'ab']", "f'{print(1)}'", "await x"),
        *("(max_iters := 5)", "1 < 2", "1 and 2", "1 if 2 else 3", "~1", "1 << 2", "{1: 2}", "`1`", "__builtins__"),
        *("print", "time", "__import__('os')", "int(time.time())", "str(time.time)", "str(time.time(), 1)"),
    ],
)
def test_an_expression_of_a_config_file_runs_no_code(write, expression, capsys):
    """Only constants, arithmetic, names above it, and str(time.time())."""
    with pytest.raises(ConfigError, match=r"x\.py:2: .*; a config file holds assignments") as error:
        settings.load(Config, [write(f"import time\nstart = {expression}")])
    assert len(str(error.value).splitlines()) == 1 and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "content",
    [
        "max_iters = " + "-" * 60_000 + "1",
        "max_iters = " + "+".join("1" * 20_000),
        "max_iters = 10 ** 5000",
        "max_iters = open(" + "x" * 60_000 + ")",
        "max_iters = '" + "x" * 60_000 + "'",
        "x" * 60_000 + " = 1",
        "max_iters = 1\0",
    ],
)
def test_a_config_file_that_is_too_long_or_deep_is_an_error_in_one_line(write, content):
    """Such a file ended in a traceback."""
    with pytest.raises(ConfigError, match=r"x.py:1: ") as error:
        settings.load(Config, [write(content)])
    (line,) = str(error.value).splitlines()
    assert len(line) < 500


def test_a_config_file_is_read_to_its_first_invalid_line(write):
    """Settings above it are still checked; errors below it may follow from it."""
    lines = ["max_iters = 'x'", "_a = [1]", "_b = _a * 2", "start = _b", "learning_rate = open(1)"]
    with pytest.raises(ConfigError) as error:
        settings.load(Config, [write("\n".join(lines)), "--flag=2"])
    places = [line.split(": ")[0] for line in str(error.value).splitlines()]
    assert places == ["x.py:1", "x.py:2", "command line"]


def test_a_config_file_name_that_is_too_long_is_an_error(monkeypatch, tmp_path):
    """The system's error ended in a traceback."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no config file aaa.*\.\.\. exists"):
        settings.load(Config, ["a" * 5000])


def test_all_errors_are_reported_together(write):
    with pytest.raises(ConfigError) as error:
        settings.load(Config, [write("a = 1\nb = 2"), "--c=3"])
    assert len(str(error.value).splitlines()) == 3
    with pytest.raises(ConfigError) as error:
        settings.load(Config, ["--max_iters=0", "--learning_rate=-1"])
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize("cls", [Config, TrainConfig, SampleConfig, VerifyConfig])
def test_help_shows_every_setting(cls):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as exit:
        settings.load(cls, ["--help"])
    assert exit.value.code == 0
    for name in setting_names(cls):
        assert f"--{name}=" in out.getvalue()
    assert "=(" not in out.getvalue()  # as the default of a field over several lines


class Limit:
    REQUESTS = 65_536


@dataclass(frozen=True)
class LimitedConfig(Settings):
    requests: int = Limit.REQUESTS  # at a time


def test_help_shows_the_value_of_a_named_constant():
    assert "--requests=65536 " in settings.help_text(LimitedConfig)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_load(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # config files are found from any folder
    config = settings.load(TrainConfig, [f"config/{path.name}"])
    assert config.eval_only or config.out_dir != TrainConfig.out_dir  # an evaluation writes nothing
    assert path.read_text(encoding="utf-8").startswith("# python train.py config/" + path.name)


@pytest.mark.parametrize("number", ["nan", "1e999"])
def test_numbers_must_be_finite(number):
    """Such numbers were accepted, and the run failed at its first checkpoint, because JSON does not have them."""
    with pytest.raises(ConfigError, match=r"^command line: grad_clip=(nan|inf): it must be a finite number$"):
        settings.load(TrainConfig, [f"--grad_clip={number}"])
    with pytest.raises(ConfigError, match=r"^dropout=(nan|inf): it must be a finite number$"):
        settings.check(TrainConfig(dropout=float(number)))


def test_class_variables_are_not_settings():
    """--config_file was answered with "did you mean config_file?"."""
    with pytest.raises(ConfigError, match=r"origins is not a setting$"):
        settings.load(Config, ["--origins=x"])
    with pytest.raises(ConfigError, match=r"config_file is not a setting$"):
        settings.load(TextConfig, ["--config_file=x"])


def test_origins_say_where_settings_were_set(write):
    config = settings.load(Config, [write("max_iters = 3\nname = 'a'"), "--name=b"])
    assert config.origins == {"max_iters": "x.py:1", "name": "command line"}
    assert Config().origins == {}


def test_a_copy_of_settings_keeps_their_origins(write):
    """dataclasses.replace lost them, and Settings.replace did not."""
    config = settings.load(Config, [write("max_iters = 3\nname = 'a'"), "--name=b"])
    for copied in (replace(config, start="c"), config.replace(start="c"), pickle.loads(pickle.dumps(config))):
        assert copied.origins == config.origins and copied.is_from_file("max_iters")
    assert config.replace({"start": "x"}, start="c").origins == {"start": "x"}
    assert "origins" not in asdict(config) and "origins" not in repr(config) and config == config.replace({})


def test_a_value_that_is_not_utf8_is_refused(write):
    """A run in such a folder was trained and saved, and could not be loaded. Names of texts to prepare may be any."""
    name = os.fsdecode(b"out-\xe9")
    for argument in (f"--name={name}", write(f"name = {name!r}"), f"{name}.py"):
        with pytest.raises(ConfigError, match=r"out-\udce9.*: it is not UTF-8; .*rename the file or folder$"):
            settings.load(Config, [argument])

    @dataclass(frozen=True)
    class Paths(Settings):
        paths: tuple[str, ...] = ()

    with pytest.raises(ConfigError, match="it is not UTF-8"):
        settings.load(Paths, [name])
    assert settings.load(TextConfig, [name]).inputs == (name,)


def test_positional_arguments_are_shown_as_given():
    """They were shown as a Python tuple."""

    @dataclass(frozen=True)
    class Words(Settings):
        inputs: tuple[str, ...] = ()

        def problems(self) -> list[tuple[str, str]]:
            return [("inputs", "name three files")]

    for words, shown in ((["a.txt", "b.txt"], "command line: inputs=a.txt b.txt: name"), ([], "inputs: name")):
        with pytest.raises(ConfigError, match=rf"^{shown} three files$"):
            settings.load(Words, words)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--lr=1e-3"], "lr .*write --learning_rate$"),
        (["--resume"], "resume .*write --init_from=resume --out_dir=RUN$"),
        (["--use_rope"], "rope .*write --position=rotary$"),
        (["--pos_emb=rope"], "pos_emb .*write --position$"),
    ],
)
def test_names_from_other_programs_are_answered_with_the_setting(args, message):
    """--lr was not a setting, and --resume needed a value."""
    with pytest.raises(ConfigError, match=message):
        settings.load(TrainConfig, args)


NANOGPT = """
out_dir = 'out-shakespeare-char'
eval_interval = 250
eval_iters = 200
log_interval = 10
always_save_checkpoint = False
wandb_log = False
wandb_project = 'shakespeare-char'
wandb_run_name = 'mini-gpt'
dataset = 'shakespeare_char'
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = 5000
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
eval_only = False
init_from = 'scratch'
bias = False
weight_decay = 1e-1
beta1 = 0.9
grad_clip = 1.0
decay_lr = True
device = 'cuda'
dtype = 'bfloat16'
compile = True
backend = 'nccl'
"""


def test_a_config_file_may_use_the_time_as_in_nanogpt(write):
    """nanoGPT's config/finetune_shakespeare.py imports time, and calls time.time()."""
    content = "import time\n\nwandb_run_name = 'ft-' + str(time.time())\ndataset = 'shakespeare'\n"
    name = settings.load(TrainConfig, [write(content)]).wandb_run_name
    assert name.startswith("ft-") and float(name.removeprefix("ft-")) > 1e9
    for other in ("import os", "from time import time", "max_iters = int(time.time())", "start = str(time.time)"):
        with pytest.raises(ConfigError, match="a config file holds assignments"):
            settings.load(TrainConfig, [write(f"{other}\n")])


def test_every_setting_of_nanogpt_is_accepted(write):
    config = settings.load(TrainConfig, [write(NANOGPT)])
    assert config.batch_size == 64 and config.wandb_run_name == "mini-gpt"


def test_a_run_given_as_a_config_file_is_an_error_that_names_out_dir(tmp_path, monkeypatch):
    """The message suggested a config file with a similar name."""
    monkeypatch.chdir(tmp_path)
    Path("out-novel").mkdir()
    with pytest.raises(ConfigError, match=r"no config file n_layer=3 exists.*--n_layer=3"):
        settings.load(TrainConfig, ["n_layer=3"])
    with pytest.raises(ConfigError, match="no config file  exists"):
        settings.load(TrainConfig, [""])
    with pytest.raises(ConfigError, match=r"out-novel is a folder, not a config file; name a run with --out_dir=out-n"):
        settings.load(SampleConfig, ["out-novel"])


def test_names_of_nanogpts_config_files_are_answered_with_the_replacement():
    """config/train_shakespeare_char.py was answered with "did you mean config/shakespeare_char.py"."""
    for name, replacement in (
        ("config/train_shakespeare_char.py", "config/nanogpt_char.py, nanoGPT's recipe, or config/shakespeare_char.py"),
        ("train_gpt2.py", "config/gpt2_124m.py"),
        ("config/eval_gpt2_xl.py", "--init_from=gpt2-xl --dataset=openwebtext --eval_only=True"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"no config file {name} exists; write {replacement}")):
            settings.load(TrainConfig, [name])
