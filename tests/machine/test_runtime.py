import os
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch._inductor.runtime import cache_dir_utils

from folio import UserError
from folio.machine import runtime
from folio.machine.runtime import Length, resolve_runtime
from tests.support.simulated_gpu import SimulatedGPU


@pytest.fixture(autouse=True)
def restore_modes():
    """Restore torch's global modes after each test."""
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("feature, dtype, precision", [("AMX", "bfloat16", "highest"), (None, "float32", "medium")])
def test_auto_on_a_cpu_chooses_the_fastest_dtype(monkeypatch, feature, dtype, precision):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(runtime, "_cpu_bf16_feature", lambda: feature)
    chosen = resolve_runtime("auto", "auto", "auto")
    assert chosen.resolved == {"device": "cpu", "dtype": dtype, "compile": False}
    assert (feature or "no known instructions for bfloat16") in chosen.description
    assert torch.get_float32_matmul_precision() == precision
    by_name = resolve_runtime("cpu", "float32", False)
    assert torch.get_float32_matmul_precision() == "highest"  # what is set is true float32
    assert by_name.description.endswith(", float32, eager")  # no reason: "as set" was printed for a tool's own choice


@pytest.mark.parametrize(
    "machine, amx, avx512, operator, feature",
    [
        ("x86_64", True, True, True, "AMX"),
        ("AMD64", False, True, True, "AVX-512 BF16"),
        ("x86_64", False, False, True, None),  # AVX-512 without bfloat16, which oneDNN emulates
        ("aarch64", False, False, True, "Arm BF16"),
        ("aarch64", False, False, False, None),
        ("riscv64", False, False, True, None),
    ],
)
def test_auto_chooses_a_cpus_dtype_by_its_features(monkeypatch, machine, amx, avx512, operator, feature):
    """Timings decided, so that beside two busy processes one start in eight chose float32 and had other results."""
    monkeypatch.setattr(runtime.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: operator)
    for owner, name in ((time, "perf_counter"), (torch, "matmul")):
        monkeypatch.setattr(owner, name, mock.Mock(side_effect=AssertionError("a time was measured")))
    assert runtime._cpu_bf16_feature() == feature
    assert runtime._best_dtype(torch.device("cpu"))[0] == ("bfloat16" if feature else "float32")


def test_a_resumed_run_keeps_what_auto_chose():
    """A resumed run for which "auto" had chosen float32 was not in the faster mode, so not bitwise identical."""
    saved = {"device": "cpu", "dtype": "bfloat16", "compile": False}
    resumed = resolve_runtime("cpu", "auto", "auto", saved=saved)
    assert resumed.resolved == saved and "bfloat16 (as before), eager (as before)" in resumed.description
    assert resolve_runtime("cpu", "float32", "auto", saved=saved).dtype == torch.float32
    other_device = resolve_runtime("cpu", "auto", "auto", saved={**saved, "device": "cuda"})
    assert "no longer bitwise identical" in other_device.description
    resolve_runtime("cpu", "auto", "auto", saved={**saved, "dtype": "float32"})
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize(
    "settings, message",
    [
        (("cuda:99", "auto", False), "device=cuda:99: .*--device=auto"),
        (("meta", "auto", False), "device=meta: .*cpu, cuda, mps.*--device=auto"),
        (("cpu", "foo", False), "dtype=foo: use auto, float32, bfloat16, float16"),
        (("cpu", "float16", False), "dtype=float16: .*CUDA.*--dtype=auto"),
    ],
)
def test_settings_that_cannot_work_are_errors(settings, message):
    with pytest.raises(UserError, match=message):
        resolve_runtime(*settings)


def test_a_compiler_that_fails_is_an_error_only_if_compile_is_set_by_name(monkeypatch):
    monkeypatch.setattr(torch, "compile", mock.Mock(side_effect=RuntimeError("no compiler here\nand much more")))
    with pytest.raises(UserError, match=r"compile=True: .*no compiler here; use --compile=False$"):
        resolve_runtime("cpu", "float32", True)
    with SimulatedGPU():
        chosen = resolve_runtime("cuda", "auto", "auto")
    assert chosen.compile is False and "no compiler here" in chosen.description


def test_short_runs_are_not_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    cuda = torch.device("cuda")
    compiled = {(Length(1e15), 1): False, (Length(1e17), 1): True, (Length(1e17), 8): False, (Length(8e17), 8): True}
    compiled |= {(Length(1e18, seconds=60), 1): False, (Length(1e15, seconds=3600), 1): True, (None, 1): True}
    # A small model's step takes as long as launching its kernels, of which the FLOPs say nothing. One of 6 layers was
    # not compiled in a run of any length.
    compiled |= {(Length(1e12, None, 6 * 5000), 1): False, (Length(1e12, None, 6 * 50_000), 1): True}
    with SimulatedGPU():
        assert {case: runtime._resolve_compile(cuda, "auto", *case)[0] for case in compiled} == compiled
        assert "about 4 s" in runtime._resolve_compile(cuda, "auto", Length(1e15))[1]
    assert "on mps" in runtime._resolve_compile(torch.device("mps"), "auto", None)[1]  # it said "on a CPU"
    assert not runtime._resolve_compile(torch.device("cpu"), "auto", Length(1e21))[0]


def test_scripts_for_a_single_process_do_not_start_under_torchrun(monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="start it with python, without torchrun"):
        resolve_runtime("cpu", "float32", False)


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    """device=cuda:0 put all processes on one GPU, and SLURM's one visible GPU per process had the wrong number."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with SimulatedGPU(device_count=2):
        assert runtime._own_gpu("cuda") == "cuda:1"
        assert runtime._own_gpu("cpu") == "cpu"
        with pytest.raises(UserError, match=r"device=cuda:0: .*--device=cuda"):
            runtime._own_gpu("cuda:0")
    with SimulatedGPU(device_count=1):
        with pytest.raises(UserError, match="--nproc_per_node=1"):
            runtime._own_gpu("cuda")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
        assert runtime._own_gpu("cuda") == "cuda:0"


def test_a_gpu_without_kernels_is_an_error_that_names_its_architecture():
    """Only memory was allocated, which succeeds on a V100 with a wheel for CUDA 13. The run failed later."""
    volta = dict(get_device_name="Tesla V100-SXM2-16GB", get_device_capability=(7, 0), get_arch_list=["sm_75", "sm_90"])
    with SimulatedGPU(**volta):
        torch.empty(1, device="cuda")
        with pytest.raises(UserError, match=r"device=cuda:0: .*V100.*\(sm_70\), only for sm_75, sm_90; .*--device=cpu"):
            resolve_runtime("cuda:0", "auto", "auto")


@pytest.mark.parametrize("has_bfloat16, dtype", [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_on_a_gpu_chooses_a_16_bit_dtype(has_bfloat16, dtype):
    with SimulatedGPU(device_count=2, is_bf16_supported=has_bfloat16):
        chosen = resolve_runtime("auto", "auto", False)
        assert torch.cuda.current_device() == 0
        assert resolve_runtime("cuda:1", "float32", False).device == torch.device("cuda", torch.cuda.current_device())
        if not has_bfloat16:
            with pytest.raises(UserError, match=r"dtype=bfloat16: .*--dtype=float16"):
                resolve_runtime("cuda", "bfloat16", False)
    assert chosen.device == torch.device("cuda", 0) and chosen.dtype == dtype


def test_a_runtime_sets_the_dtype_of_matmuls_and_moves_arrays_to_its_device():
    a = torch.ones(4, 4)
    for dtype in (torch.float32, torch.bfloat16):
        with resolve_runtime("cpu", str(dtype).removeprefix("torch."), False).autocast():
            assert (a @ a).dtype == dtype
        assert (a @ a).dtype == torch.float32
    x, y = resolve_runtime("cpu", "float32", False).to_device(np.arange(6).reshape(2, 3)[:, :-1], np.ones((2, 2)))
    assert x.tolist() == [[0, 1], [3, 4]] and y.shape == (2, 2)


def test_peak_flops_are_those_of_the_data_sheet_in_16_bits():
    for name, dtype, peak in (
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H100 PCIe", "float32", None),
        ("Some GPU", "bfloat16", None),
    ):
        with SimulatedGPU(get_device_name=name):
            assert resolve_runtime("cuda", dtype, False).peak_flops() == peak
    cpu = resolve_runtime("cpu", "float32", False)
    assert cpu.peak_flops() is None and cpu.peak_memory() > 1e6


@pytest.mark.gpu
def test_a_gpu_computes_in_the_chosen_dtype():
    chosen = resolve_runtime("auto", "auto", "auto")
    assert chosen.device.type == "cuda"
    (a,) = chosen.to_device(np.ones((4, 4), dtype=np.float32))
    with chosen.autocast():
        assert (a @ a).dtype == chosen.dtype


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("owner", [0, 12345])
def test_torch_compile_does_not_execute_the_cache_of_another_user(owner, tmp_path, monkeypatch, capfd):
    """The cache has a predictable name in /tmp, where another user can create it first."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"})
    monkeypatch.setattr(cache_dir_utils, "default_cache_dir", lambda: str(tmp_path / "torchinductor"))
    (tmp_path / "torchinductor").mkdir(mode=0o755)
    os.chown(tmp_path / "torchinductor", owner, owner)
    runtime.use_private_compiler_cache()
    chosen, line = os.environ.get("TORCHINDUCTOR_CACHE_DIR"), capfd.readouterr().err
    if owner == 0:
        assert chosen is None and not line
    else:
        assert Path(chosen).stat().st_mode & 0o777 == 0o700 and "belongs to another user" in line
