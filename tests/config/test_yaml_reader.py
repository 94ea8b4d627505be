import math

import pytest

from toque.config.yaml_reader import read_yaml
from toque.errors import ConfigError

SCALARS = [
    ("3e-4", 3e-4), ("1e5", 1e5), ("1.", 1.0), ("-.5e3", -500.0), ("1_000", 1000), ("-7", -7),
    ("true", True), ("FALSE", False), ("yes", "yes"), ("on", "on"), ("~", None), ("", None),
    ("null", None), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("'3'", "3"),
    ("3 epochs", "3 epochs"), ("10 %", "10 %"), ("0x10", "0x10"), ("!!str 5", "5"),
    ("½ cup", "½ cup"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalars(text, value):
    read = read_yaml(f"k: {text}", "f").value["k"]
    assert read == value
    assert type(read) is type(value)


def test_infinity_and_nan():
    value = read_yaml("[.inf, -.inf, .nan]", "f").value
    assert value[:2] == [math.inf, -math.inf]
    assert math.isnan(value[2])


def test_lines_of_everything():
    document = read_yaml("a: 1\nb:\n  c:\n  - x\n  - d: 2\n", "f.yaml")
    assert document.value == {"a": 1, "b": {"c": ["x", {"d": 2}]}}
    assert document.lines[("b", "c", 1, "d")] == 5
    assert document.lines[("b", "c", 0)] == 4


def test_an_alias_may_repeat_a_value_but_not_without_end():
    assert read_yaml("a: &x [1]\nb: *x", "f").value == {"a": [1], "b": [1]}
    rows = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(ConfigError, match="alias"):
        read_yaml("\n".join(rows), "f")


@pytest.mark.parametrize(
    "text", ["[" * 60, "{a: " * 60, "- " * 60, "? " * 60, "[" * 60 + "]" * 60]
)
def test_nesting_is_refused_while_it_is_read(text):
    # PyYAML asks at each token about every list and mapping around it: deep and long is quadratic.
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_yaml(text + "1, " * 10, "f")
    assert read_yaml("[" * 40 + "]" * 40, "f").value


def test_values_without_end_are_refused_before_all_of_them_are_composed():
    with pytest.raises(ConfigError, match="has more than 20,000 values"):
        read_yaml(f"x: [{'1, ' * 50_000}]", "f")
    assert len(read_yaml(f"x: [{'1, ' * 19_000}]", "f").value["x"]) == 19_000
