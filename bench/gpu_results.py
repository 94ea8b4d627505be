"""Records of bench/gpu.sh: add one and print its summary, or write all as a table.

    python bench/gpu_results.py results/gpu/results.jsonl [--page lab/performance.md]

This writes the table as a section of the page, named after the GPU. It replaces an older section of
the same GPU. Records of a rehearsal are rejected, because they are not measurements. The script
imports only the standard library, so that it starts fast on the GPU machine.
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
    """Summarise every micro-batch size of both sides."""

    def side(run: Record) -> str:
        if "failed" in run:
            return f"{run['rows']} rows: {run['failed']}"
        speed = f"{run['tokens_per_second']:,.0f} tokens/s, {run['mfu']:.1%} MFU"
        return f"{run['rows']} rows: {speed}, {run['peak_gib']} GiB, {run['attention']}"

    parts_of_line = [side(run) for run in record["ours"]]
    if record["theirs"]:
        peer = record["details"]["arguments"]["beside"]
        parts_of_line.append(
            f"{peer}: {'; '.join(side(run) for run in record['theirs'])}"
        )
    if record["ratio"]:
        parts_of_line.append(f"ratio {record['ratio']['median']:.2f}")
    return "; ".join(parts_of_line)


def probe(record: Record) -> str:
    """Count the combinations with kernels and list the kernels."""
    rows = record["ours"]
    working = sum(row["options"] is not None for row in rows)
    return f"{working} of {len(rows)} have kernels: " + "; ".join(
        f"{row['precision']} {row['head']}{' with bias' if row['bias'] else ''}: {row['words']}"
        for row in rows
    )


def continued(record: Record) -> str:
    """State the step of the kill and whether the results are identical."""
    ours, equal = record["ours"], record["quality"]["passes"]
    where = f"{record['details']['device']}, {record['details']['precision']}"
    same = (
        "identical" if equal else f"DIFFERENT {', '.join(record['quality']['other'])}"
    )
    return (
        f"{where}: killed after update {ours['killed_after_step']}, continued from "
        f"{ours['continued_from_step']}: {same}"
    )


def texts(record: Record) -> str:
    """State tokens per second of generation on both sides, and of evaluation."""

    def speeds(runs: list[Record]) -> str:
        return ", ".join(
            f"{run['rows']}: {run['tokens_per_second']:,.0f}" for run in runs
        )

    ratio = record["ratio"]["pairs"] if record["ratio"] else "void"
    return (
        f"{record['details']['shape']}, {record['details']['precision']}, tokens/s by batch: "
        f"{speeds(record['ours']['texts'])}; generate: {speeds(record['theirs']['texts'])}; "
        f"ratios {ratio}; held-out loss {speeds(record['ours']['held_out'])}"
    )


def plans(record: Record) -> str:
    """List planned and measured memory."""
    return "; ".join(
        row.get("failed")
        or f"{row['part']}, {row['rows']} rows: held {row['planned_held_gib']} planned, "
        f"{row['held_gib']} GiB measured ({row['held_error']:+.1%}), taken "
        f"{row['planned_taken_gib']}, {row['taken_gib']} ({row['taken_error']:+.1%})"
        for row in record["ours"]
    )


def parts(record: Record) -> str:
    """List the ratio of every part of the update."""
    shown = [
        f"{name} {part['ratio']['median']:.2f}" if part.get("ratio") else f"{name} -"
        for name, part in record["details"]["parts"].items()
    ]
    return f"off / on: {', '.join(shown)}; {record['details']['mfu']:.1%} MFU"


def training(record: Record) -> str:
    """State useful tokens per second of `toque train` and of the other trainer."""
    speed = record["details"]["useful_tokens_per_second"]
    ratio = record["ratio"]["median"] if record["ratio"] else "void"
    return f"{speed['ours']:,.0f} useful tokens/s against {speed['theirs']:,.0f}: ratio {ratio}"


def machine(record: Record) -> str:
    """Name the GPU and the versions."""
    versions = record["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
    return f"{record['device']}, driver {record['driver']}; {named}"


def tail(record: Record) -> str:
    """Return the last output of a command without a record."""
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
    """Summarise a part in one line."""
    record = part["record"]
    if record is None:
        return f"FAILED ({part['how']}): {part['said']}"
    if "skipped" in record:
        return f"skipped: {record['skipped']}"
    summary = FIGURES[record["name"]](record)
    if record.get("quality", {}).get("passes") is False:
        return f"{summary} VOID: {record['quality'].get('reason', 'see the record')}"
    return summary


def added(a: argparse.Namespace) -> str:
    """Append the record of a part to the file. Return its summary."""
    log = (
        a.said.read_text(encoding="utf-8", errors="replace") if a.said.exists() else ""
    )
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
            log += text
    ending = {124: "time limit", 137: "killed"}.get(a.code, f"exit code {a.code}")
    last = " / ".join(line for line in log.splitlines()[-3:] if line.strip())[-600:]
    part = {
        "part": a.add,
        "seconds": a.seconds,
        "how": ending,
        "said": last,
        "record": record,
    }
    if a.rehearsal:
        part["rehearsal"] = True
    with a.results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(part) + "\n")
    note = f" ({a.note})" if a.note else ""
    return f"{a.add}{note}, {a.seconds} s: {figures(part)}"


def section(results: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the section, starting with its heading."""
    named = {part["part"]: part for part in results}
    about = named["machine"]["record"]
    lines = [
        heading(about["device"], datetime.now(UTC).strftime("%Y-%m-%d")),
        "",
        (
            f"{machine(about)}. `OUT=results/gpu bench/gpu.sh`, {about['begun']} UTC, and "
            "`python bench/gpu_results.py`. VOID: the check of the part failed, and its numbers "
            "do not count."
        ),
        "",
        "| part | result | s |",
        "|---|---|---:|",
    ]
    tables = {
        "speed/attention_probe": probe_table,
        "quality/plan_beside_sweeps": plan_table,
    }
    for part in results:
        name = (part["record"] or {}).get("name")
        if name == "machine":
            continue
        summary = (
            "in the table below" if name in tables else figures(part).replace("|", "/")
        )
        lines.append(f"| {part['part']} | {summary} | {part['seconds']} |")
    for part in results:
        record = part["record"] or {}
        if record.get("name") in tables and "skipped" not in record:
            lines += ["", *tables[record["name"]](record)]
    return [*lines, ""]


def heading(device: str, day: str) -> str:
    """Return the heading of the section of a GPU."""
    return f"## {day} · Results of bench/gpu.sh on {device}"


def probe_table(record: Record) -> list[str]:
    """Return a table of the FlexAttention kernels."""
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
    """Return a table of planned and measured memory."""
    return [
        "| part | rows | held: planned, measured, GiB | taken: planned, measured, GiB |",
        "|---|---:|---|---|",
        *(
            f"| {row['part']} | {row['rows']} | {row['failed']} | |"
            if "failed" in row
            else f"| {row['part']} | {row['rows']} | {row['planned_held_gib']}, "
            f"{row['held_gib']} ({row['held_error']:+.1%}) | {row['planned_taken_gib']}, "
            f"{row['taken_gib']} ({row['taken_error']:+.1%}) |"
            for row in record["ours"]
        ),
    ]


def placed(page: str, lines: list[str], device: str) -> str:
    """Replace the older section of the GPU, or insert a new first section."""
    older = re.compile(
        rf"^## \S+ · Results of bench/gpu\.sh on {re.escape(device)}\n.*?(?=^## |\Z)",
        re.MULTILINE | re.DOTALL,
    )
    text = "\n".join(lines) + "\n"
    if older.search(page):
        return older.sub(lambda _: text, page, count=1)
    first = page.find("\n## ") + 1
    return page[:first] + text + page[first:]


def table(a: argparse.Namespace) -> str:
    """Write the section. Return a summary."""
    results = [
        json.loads(line) for line in a.results.read_text(encoding="utf-8").splitlines()
    ]
    rehearsed = [
        part["part"]
        for part in results
        if part.get("rehearsal") or _rehearsed(part["record"])
    ]
    if rehearsed:
        raise SystemExit(
            f"{a.results} is from a rehearsal ({', '.join(rehearsed[:3])} ...), which measures "
            "nothing. Run bench/gpu.sh on a machine with a GPU."
        )
    if not any(part["part"] == "machine" and part["record"] for part in results):
        raise SystemExit(
            f"{a.results} has no record of the machine. Nothing was written."
        )
    device = next(
        part["record"]["device"] for part in results if part["part"] == "machine"
    )
    page = placed(a.page.read_text(encoding="utf-8"), section(results), device)
    a.page.write_text(page, encoding="utf-8")
    return f"{a.page}: {len(results) - 1} parts of {device}"


def _rehearsed(record: Record | None) -> bool:
    return bool((record or {}).get("rehearsal"))


def main() -> None:
    """Parse the command line. bench/gpu.sh uses --add."""
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
