"""Records of bench/gpu.sh: one added and told in a line, and all of them made into a table.

    python bench/gpu_results.py results/gpu/results.jsonl [--page lab/performance.md]

writes the table as a section of the page, named after the card, in place of an older one of that
card. Records of a rehearsal are refused: their figures are of no machine. Imports nothing that must
be installed: it runs in the middle of a GPU's minutes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("python", "torch", "triton", "transformers", "peft", "tokenizers", "toque")


def sweep(record: Record) -> str:
    """Every micro-batch, ours and theirs."""

    def side(found: Record) -> str:
        if "failed" in found:
            return f"{found['rows']} rows: {found['failed']}"
        speed = f"{found['tokens_per_second']:,.0f} tokens/s, {found['mfu']:.1%} MFU"
        return f"{found['rows']} rows: {speed}, {found['peak_gib']} GiB, {found['attention']}"

    words = [side(found) for found in record["ours"]]
    if record["theirs"]:
        beside = record["details"]["arguments"]["beside"]
        words.append(f"{beside}: {'; '.join(side(found) for found in record['theirs'])}")
    if record["ratio"]:
        words.append(f"ratio {record['ratio']['median']:.2f}")
    return "; ".join(words)


def probe(record: Record) -> str:
    """How many combinations have kernels, and what was found of each."""
    rows = record["ours"]
    working = sum(row["options"] is not None for row in rows)
    return f"{working} of {len(rows)} have kernels: " + "; ".join(
        f"{row['precision']} {row['head']}{' with bias' * row['bias']}: {row['words']}"
        for row in rows
    )


def continued(record: Record) -> str:
    """Where a run was killed, and whether it came to the same bits."""
    ours, equal = record["ours"], record["quality"]["passes"]
    where = f"{record['details']['device']}, {record['details']['precision']}"
    same = "the same bits" if equal else f"OTHER {', '.join(record['quality']['other'])}"
    return (
        f"{where}: killed after update {ours['killed_after_step']}, continued from "
        f"{ours['continued_from_step']}: {same}"
    )


def texts(record: Record) -> str:
    """Tokens a second of texts, ours and transformers', and of held-out losses."""

    def side(found: Record) -> str:
        each = [f"{x['rows']}: {x['tokens_per_second']:,.0f}" for x in found["texts"]]
        return ", ".join(each)

    held = ", ".join(
        f"{x['rows']}: {x['tokens_per_second']:,.0f}" for x in record["ours"]["held_out"]
    )
    ratio = record["ratio"]["pairs"] if record["ratio"] else "void"
    return (
        f"{record['details']['shape']}, {record['details']['precision']}, tokens/s by batch: "
        f"{side(record['ours'])}; generate: {side(record['theirs'])}; ratios {ratio}; "
        f"held-out loss {held}"
    )


def plans(record: Record) -> str:
    """Planned memory beside measured."""
    return "; ".join(
        found.get("failed")
        or f"{found['part']}, {found['rows']} rows: held {found['planned_held_gib']} planned, "
        f"{found['held_gib']} GiB measured ({found['held_error']:+.1%}), taken "
        f"{found['planned_taken_gib']}, {found['taken_gib']} ({found['taken_error']:+.1%})"
        for found in record["ours"]
    )


def parts(record: Record) -> str:
    """What every part of the update gives."""
    found = record["details"]["parts"]
    shown = [
        f"{name} {part['ratio']['median']:.2f}" if part.get("ratio") else f"{name} -"
        for name, part in found.items()
    ]
    return f"off / on: {', '.join(shown)}; {record['details']['mfu']:.1%} MFU"


def training(record: Record) -> str:
    """Useful tokens a second of `toque train` beside another trainer."""
    speed = record["details"]["useful_tokens_per_second"]
    ratio = record["ratio"]["median"] if record["ratio"] else "void"
    return f"{speed['ours']:,.0f} useful tokens/s beside {speed['theirs']:,.0f}: ratio {ratio}"


def machine(record: Record) -> str:
    """The card and the versions."""
    versions = record["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
    return f"{record['device']}, driver {record['driver']}; {named}"


def tail(record: Record) -> str:
    """What a command said last, which had no record to give."""
    return str(record["said"])


FIGURES: dict[str, Callable[[Record], str]] = {
    "speed/sweep": sweep,
    "speed/attention_probe": probe,
    "robustness/killed_and_continued": continued,
    "speed/device_text": texts,
    "quality/plan_beside_sweeps": plans,
    "speed/parts": parts,
    "speed/train": training,
    "machine": machine,
    "said": tail,
}


def figures(part: Mapping[str, Any]) -> str:
    """A part's figures in a line."""
    record = part["record"]
    if record is None:
        return f"FAILED ({part['how']}): {part['said']}"
    if "skipped" in record:
        return f"skipped: {record['skipped']}"
    found = FIGURES[record["name"]](record)
    void = record.get("quality", {}).get("passes") is False
    return f"{found} VOID: {record['quality'].get('reason', 'see the record')}" if void else found


def added(a: argparse.Namespace) -> str:
    """Append a part's record to the file; its line."""
    said = a.said.read_text(encoding="utf-8", errors="replace") if a.said.exists() else ""
    text = a.output.read_text(encoding="utf-8", errors="replace")
    record: Any = None
    if a.words:
        lines = [line for line in text.splitlines() if line.strip()]
        record = {"name": "said", "said": " / ".join(lines[-a.words :])[-600:]}
        record["quality"] = {"passes": a.code == 0}
    else:
        try:
            record = json.loads(text)
        except ValueError:
            said += text
    how = {124: "its time was over", 137: "it was killed"}.get(a.code, f"exit code {a.code}")
    last = " / ".join(line for line in said.splitlines()[-3:] if line.strip())[-600:]
    part = {"part": a.add, "seconds": a.seconds, "how": how, "said": last, "record": record}
    if a.rehearsal:
        part["rehearsal"] = True
    with a.results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(part) + "\n")
    note = f" ({a.note})" if a.note else ""
    return f"{a.add}{note}, {a.seconds} s: {figures(part)}"


def section(found: list[dict[str, Any]]) -> list[str]:
    """The lines of the table's section, its heading first."""
    named = {part["part"]: part for part in found}
    about = named["machine"]["record"]
    lines = [
        heading(about["device"], datetime.now(UTC).strftime("%Y-%m-%d")),
        "",
        (
            f"{machine(about)}. `OUT=results/gpu bench/gpu.sh`, {about['begun']} UTC, and "
            "`python bench/gpu_results.py`. VOID: the part's own check failed, and its figures do "
            "not count."
        ),
        "",
        "| part | figures | s |",
        "|---|---|---:|",
    ]
    tables = {"speed/attention_probe": probe_table, "quality/plan_beside_sweeps": plan_table}
    for part in found:
        name = (part["record"] or {}).get("name")
        if name == "machine":
            continue
        words = "in the table below" if name in tables else figures(part).replace("|", "/")
        lines.append(f"| {part['part']} | {words} | {part['seconds']} |")
    for part in found:
        record = part["record"] or {}
        if record.get("name") in tables and "skipped" not in record:
            lines += ["", *tables[record["name"]](record)]
    return [*lines, ""]


def heading(device: str, day: str) -> str:
    """The heading of a card's section."""
    return f"## {day} · Figures of bench/gpu.sh on {device}"


def probe_table(record: Record) -> list[str]:
    """Kernels of FlexAttention, combination by combination."""
    return [
        "| precision | head | bias | kernels of FlexAttention | s |",
        "|---|---:|---|---|---:|",
        *(
            f"| {row['precision']} | {row['head']} | {'yes' if row['bias'] else 'no'} "
            f"| {row['words'].replace('|', '/')} | {row['seconds']} |"
            for row in record["ours"]
        ),
    ]


def plan_table(record: Record) -> list[str]:
    """Planned beside measured memory."""
    return [
        "| part | rows | held: planned, measured, GiB | taken: planned, measured, GiB |",
        "|---|---:|---|---|",
        *(
            f"| {found['part']} | {found['rows']} | {found['failed']} | |"
            if "failed" in found
            else f"| {found['part']} | {found['rows']} | {found['planned_held_gib']}, "
            f"{found['held_gib']} ({found['held_error']:+.1%}) | {found['planned_taken_gib']}, "
            f"{found['taken_gib']} ({found['taken_error']:+.1%}) |"
            for found in record["ours"]
        ),
    ]


def placed(page: str, lines: list[str], device: str) -> str:
    """The page with the section, in place of the card's older one, or before all others."""
    older = re.compile(
        rf"^## \S+ · Figures of bench/gpu\.sh on {re.escape(device)}\n.*?(?=^## |\Z)",
        re.MULTILINE | re.DOTALL,
    )
    text = "\n".join(lines) + "\n"
    if older.search(page):
        return older.sub(lambda _: text, page, count=1)
    first = page.find("\n## ") + 1
    return page[:first] + text + page[first:]


def table(a: argparse.Namespace) -> str:
    """Write the section; what was done."""
    found = [json.loads(line) for line in a.results.read_text(encoding="utf-8").splitlines()]
    made_up = [
        part["part"] for part in found if part.get("rehearsal") or _rehearsed(part["record"])
    ]
    if made_up:
        raise SystemExit(
            f"{a.results} is of a rehearsal ({', '.join(made_up[:3])} ...): its figures are of no "
            "machine and do not go into a table. Run bench/gpu.sh on a machine with a GPU."
        )
    if not any(part["part"] == "machine" and part["record"] for part in found):
        raise SystemExit(f"{a.results} does not say which machine it is of; nothing was written.")
    device = next(part["record"]["device"] for part in found if part["part"] == "machine")
    page = placed(a.page.read_text(encoding="utf-8"), section(found), device)
    a.page.write_text(page, encoding="utf-8")
    return f"{a.page}: {len(found) - 1} parts of {device}"


def _rehearsed(record: Record | None) -> bool:
    return bool((record or {}).get("rehearsal"))


def main() -> None:
    """The command line; with --add, of bench/gpu.sh."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("results", type=Path)
    p.add_argument("--page", type=Path, default=ROOT / "lab" / "performance.md")
    p.add_argument("--add", metavar="PART", help=argparse.SUPPRESS)
    p.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--said", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--code", type=int, default=0, help=argparse.SUPPRESS)
    p.add_argument("--seconds", type=int, default=0, help=argparse.SUPPRESS)
    p.add_argument("--words", type=int, default=0, help=argparse.SUPPRESS)
    p.add_argument("--note", default="", help=argparse.SUPPRESS)
    p.add_argument("--rehearsal", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    print(added(a) if a.add else table(a))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
