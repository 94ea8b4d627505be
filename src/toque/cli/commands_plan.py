"""Command `plan`: what a run will take, before it begins."""

from __future__ import annotations

from json import dumps

from toque.cli.commands_data import Overrides, load, loading, reporter


def plan(
    config: str,
    /,
    *overrides: Overrides,
    hardware: str | None = None,
    utilisation: float | None = None,
    json: bool = False,
) -> None:
    """Say what a run will take before it begins: memory by part, hours, disk, bucket traffic.

    No weight is read. What to change is worked out too, each change with its own figures. With a
    prepared store the lengths are those of its examples.

    Args:
        config: YAML file or preset.
        overrides: settings to change, as section.field=value.
        hardware: a card such as rtx-4090 or h100, by its maker's data sheet; without it, this
            machine, measured. Where CONFIG says what changes on that card, it is changed.
        utilisation: per cent of the peak to assume; what is known, or a stated guess, when left
            out.
        json: print one JSON object instead of a table.
    """
    from toque.config.resolve import names_card
    from toque.hardware.cards import card_named

    changed = None
    if hardware is not None:
        hardware = card_named(hardware).name
        changed = hardware if names_card(config, hardware) else None
    settings = load(config, overrides, hardware=changed).config
    with loading():
        from toque.workflows.plan.planning import plan as workflow

    share = None if utilisation is None else utilisation / 100.0
    found = workflow(settings, hardware=hardware, utilisation=share, reporter=reporter())
    print(dumps(found.record(), indent=1) if json else found)
