import pytest

from toque.errors import ConfigError
from toque.hardware.cards import card_named, card_of_device, cards


def test_every_card_is_whole_and_has_a_source() -> None:
    assert len(cards()) == 36
    for card in cards().values():
        assert card.memory_bytes > 8e9, card.name
        assert {"fp16", "fp32"} <= set(card.flops_per_second), card.name
        assert card.source.startswith("NVIDIA "), card.name
        # 16 bits are never slower than 32 in a card's own units.
        assert card.flops_per_second["fp16"] > card.flops_per_second["fp32"], card.name


NAMES = {
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200-nvl",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": "a10g",
    "NVIDIA L4": "l4",
    "NVIDIA L40": "l40",
    "NVIDIA L40S": "l40s",
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB": "v100",
    "NVIDIA RTX A6000": "rtx-a6000",
    "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000",
    "NVIDIA GeForce RTX 3090 Ti": "rtx-3090-ti",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
}
OTHERS = (
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4080 SUPER",
    "NVIDIA GeForce RTX 3080 Ti",
    "NVIDIA GeForce RTX 3080 Laptop GPU",
    "NVIDIA GeForce RTX 5070 Ti Laptop GPU",
    "NVIDIA RTX A1000",
    "NVIDIA RTX A4000",
    "NVIDIA RTX 6000 Ada Generation Laptop GPU",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA A10M",
    "NVIDIA A40-48Q",
    "NVIDIA A800-SXM4-80GB",
    "NVIDIA GB200",
    "NVIDIA H20",
    "Tesla T40 24GB",
    "Quadro T400",
    "AMD Instinct MI300X",
    "Some GPU",
)


@pytest.mark.parametrize("device", [*NAMES, *OTHERS])
def test_a_device_is_a_card_by_its_whole_name(device: str) -> None:
    found = card_of_device(device)
    assert (None if found is None else found.name) == NAMES.get(device)


def test_no_two_cards_share_a_name_of_torchs() -> None:
    names = [name for card in cards().values() for name in card.devices]
    assert len(names) == len(set(names))


def test_memory_is_what_torch_sees() -> None:
    """As makers state it, an H100 had 74.5 GiB and a 4090 24.0."""
    seen = {
        name: round(card_named(name).memory_bytes / 2**30, 1)
        for name in ("h100", "rtx-4090")
    }
    assert seen == {"h100": 79.2, "rtx-4090": 23.5}


def test_an_unknown_card_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"'rtx-4091' is not a known card.*Nearest: rtx-4090"
    ):
        card_named("rtx-4091")
    assert card_named("NVIDIA RTX 4090").name == "rtx-4090"
