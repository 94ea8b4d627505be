import pytest

from toque.errors import ConfigError
from toque.hardware.cards import card_named, card_of_device, cards


def test_every_card_is_whole_and_has_a_source() -> None:
    assert len(cards()) == 24
    for card in cards().values():
        assert card.memory_bytes > 8e9, card.name
        assert card.bytes_per_second > 1e11, card.name
        assert {"fp16", "fp32"} <= set(card.flops_per_second), card.name
        assert card.source.startswith("NVIDIA "), card.name
        # 16 bits are never slower than 32 in a card's own units.
        assert card.flops_per_second["fp16"] > card.flops_per_second["fp32"], card.name


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx-3090-ti"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
    ],
)
def test_a_device_is_found_by_its_longest_name(device: str, name: str) -> None:
    found = card_of_device(device)
    assert found is not None
    assert found.name == name
    assert card_of_device("Some GPU") is None


def test_an_unknown_card_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'rtx-4091' is not a card.*Nearest: rtx-4090"):
        card_named("rtx-4091")
    assert card_named("NVIDIA RTX 4090").name == "rtx-4090"
