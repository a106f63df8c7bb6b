"""What is answered without a kernel while a tree is built."""

from __future__ import annotations

import importlib.util

import pytest

torch = pytest.importorskip("torch")

from vtaps.runtime.compat.stand_ins import WithoutData, _decorate, _Placeholders, autocast_off  # noqa: E402


def test_numbers_of_a_tensor_without_data_are_zero_and_those_of_others_are_theirs() -> None:
    with torch.device("meta"), WithoutData():
        slopes = torch.arange(3, dtype=torch.float32)
        assert slopes[1:].tolist() == [0.0, 0.0]
        assert float(slopes[0].detach().cpu().float().item()) == 0.0
        assert torch.arange(3, device="cpu").tolist() == [0, 1, 2]


def test_an_empty_tensor_has_no_storage_wherever_a_layer_wants_it() -> None:
    with torch.device("meta"), WithoutData():
        assert torch.empty(2, device="cpu").is_meta
        assert not torch.zeros(2, device="cpu").is_meta
    assert not torch.empty(2, device="cpu").is_meta


def test_nothing_autocasts_on_a_fake_device() -> None:
    asked = torch.is_autocast_enabled
    with autocast_off():
        assert torch.is_autocast_enabled("meta") is False
        with torch.amp.autocast("meta", enabled=False):
            pass
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled("cpu") is True
    assert torch.is_autocast_enabled is asked


def test_a_kernel_is_launched_and_leaves_its_tensors() -> None:
    @_decorate
    def kernel(out: object, n: int) -> None:
        raise AssertionError

    @_decorate(debug=True)
    def other(out: object) -> None:
        raise AssertionError

    out = torch.ones(2)
    assert kernel[(1,)](out, 2) is None and other[lambda meta: (1,)](out) is None
    assert kernel.arg_names == ["out", "n"] and kernel.__name__ == "kernel"
    assert out.tolist() == [1.0, 1.0]


def test_a_placeholder_gives_any_name_and_none_of_pythons_own() -> None:
    finder = _Placeholders("pictures")
    assert finder.find_spec("pictures_too") is None
    spec = finder.find_spec("pictures.transforms.v2")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert module.InterpolationMode.NEAREST != module.InterpolationMode.BICUBIC
    with pytest.raises(AttributeError):
        _ = module.__wrapped__
