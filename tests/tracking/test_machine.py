import pytest
import torch

from sidestream.tracking import machine
from sidestream.tracking.machine import gpu_peak, memory_reader, peak
from tests.clock import virtual_time

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0, 67.0),
        ("NVIDIA H100 PCIe", 756.0, 51.2),
        ("NVIDIA H100 NVL", 835.0, None),
        ("NVIDIA H200", 989.0, 67.0),
        ("NVIDIA GH200 480GB", 989.0, None),
        ("NVIDIA H200 NVL", 835.0, 60.0),
        ("NVIDIA H800", 989.0, None),
        ("NVIDIA H800 PCIe", None, None),
        ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
        ("NVIDIA B200", 2250.0, None),
        ("NVIDIA GB200", 2500.0, None),
        ("NVIDIA L40S", 362.0, 91.6),
        ("NVIDIA L4", 121.0, 30.3),
        ("NVIDIA L40", None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("NVIDIA GeForce RTX 4090", None, None),
    ],
)
def test_known_gpus(name, bf16, fp32):
    for dtype, tflops in ((torch.bfloat16, bf16), (torch.float32, fp32)):
        found = gpu_peak(name, dtype)
        assert found.flops == (None if tflops is None else tflops * 1e12)
        assert name in found.source
        assert (found.flops is None) == found.source.startswith("none: ")


def test_a_stated_peak_and_none():
    assert peak(2, device=CPU, dtype=torch.float32) == machine.Peak(2e12, "trainer.peak_tflops")
    assert peak(None, device=CPU, dtype=torch.float32).flops is None


def test_a_cpu_is_measured_once_and_the_random_numbers_stay():
    machine.cpu_peak.cache_clear()
    before = torch.get_rng_state()
    with virtual_time(machine, tick=0.02):  # a product takes one tick, more than a 1024 x 1024 one should
        found = peak("auto", device=CPU, dtype=torch.float32)
    assert found.flops == pytest.approx(2 * 512**3 / 0.02)
    assert found.source.startswith("measured: best matmul of 512 x 512, fp32")
    assert torch.equal(torch.get_rng_state(), before)
    assert peak("auto", device=CPU, dtype=torch.float32) is found
    machine.cpu_peak.cache_clear()


def test_memory_of_this_process():
    read = memory_reader(CPU)
    current, highest = read()
    assert 0 <= current <= highest
    held = torch.ones(30_000_000)
    assert read()[1] >= highest
    assert held.sum() == 30_000_000
