"""The results: a JSON document of sections, and the same as Markdown. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, commit

from gpu.processes import Outcome
from gpu.sections import SECTIONS, Scale

ERROR_CHARACTERS = 1500  # of a section's error, from its end


class Report:
    """Results of sections, each with the card, the versions and the commit it was run with.

    Sections that are run again replace what is there of them, and others stay. Both files are at
    `path`, which has no suffix; None: named by the card. Written after every section.
    """

    def __init__(self, scale: Scale, path: Path | None) -> None:
        self._path = path
        self._scale = scale
        self._commit = commit()
        self._sections: dict[str, dict[str, Any]] = {}
        if path is not None:
            self._read(path)

    @property
    def markdown(self) -> str:
        return markdown(self._sections)

    def add(self, outcomes: Sequence[Outcome]) -> bool:
        """Put in a section's outcome, several where it ran in several processes, and write.

        Returns whether it is complete and everything in it is as it should be.
        """
        if self._path is None and "card" in outcomes[0].facts:
            self._path = RESULTS / f"gpu-{_short_name(outcomes[0].facts['card'])}"
            self._read(self._path)
        errors = [outcome.error for outcome in outcomes if outcome.error]
        worst = next((o.status for o in outcomes if o.status != "complete"), "complete")
        rows = merged_rows([row for outcome in outcomes for row in outcome.rows])
        self._sections[outcomes[0].section] = {
            "scale": self._scale.value,
            "status": worst,
            "seconds": round(max(outcome.seconds or 0 for outcome in outcomes), 1),
            "commit": self._commit,
            "facts": outcomes[0].facts,
            "clocks": outcomes[0].clocks,
            "errors": [error[-ERROR_CHARACTERS:] for error in errors],
            "rows": rows,
        }
        if self._path is not None:
            self._write(self._path)
        return worst == "complete" and all(row["is_met"] is not False for row in rows)

    def _read(self, path: Path) -> None:
        document = path.with_name(path.name + ".json")
        if document.is_file():
            before = json.loads(document.read_text(encoding="utf-8"))["sections"]
            self._sections = {**before, **self._sections}

    def _write(self, path: Path) -> None:
        order = [section.name for section in SECTIONS]
        self._sections = {name: self._sections[name] for name in order if name in self._sections}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"sections": self._sections}, indent=1) + "\n"
        path.with_name(path.name + ".json").write_text(text, encoding="utf-8")
        path.with_name(path.name + ".md").write_text(self.markdown, encoding="utf-8")


def _short_name(card: str) -> str:
    """`NVIDIA H200` as the part of a file's name: `h200`."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower().removeprefix("nvidia ")).strip("-")


def merged_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the same name as one: counts are added up, and all must be met.

    A claim of a single case has the case's name, so that a failure may meet the claim's counts.
    """
    by_name: dict[str, dict[str, Any]] = {}
    for row in rows:
        if (other := by_name.get(row["name"])) is None:
            by_name[row["name"]] = row
            continue
        by_name[row["name"]] = {
            **row,
            "figures": _added(other["figures"], row["figures"]),
            "is_met": bool(other["is_met"] and row["is_met"]),
        }
    return list(by_name.values())


def _added(figures: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of both; of the counts that both have the sum, of what is said in words the first."""
    added = {**others, **figures}
    for name in figures.keys() & others.keys():
        if not isinstance(figures[name], str):
            added[name] = figures[name] + others[name]
    return added


def markdown(sections: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["# What `bench/gpu_check.py` measured", ""]
    questions = {section.name: section.question for section in SECTIONS}
    for name, section in sections.items():
        lines += [f"## {name}", "", questions[name], "", *_table(section["rows"]), ""]
        facts = ", ".join(f"{key} {value}" for key, value in section["facts"].items())
        clocks = " / ".join(str(clock) for clock in section["clocks"] if clock)
        lines.append(
            f"{section['status']} in {section['seconds']} s"
            + (f" ({section['scale']} sizes)" if section["scale"] != "full" else "")
            + f"; {facts}"
            + (f"; clocks, temperature and power before / after: {clocks}" if clocks else "")
            + f"; commit {section['commit']}."
        )
        for error in section["errors"]:
            lines += ["", "```", error.strip(), "```"]
        lines.append("")
    return "\n".join(lines)


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return ["No rows."]
    columns = [*dict.fromkeys(name for row in rows for name in row["figures"])]
    lines = [
        f"| | {' | '.join(columns)} | bar | met |",
        "|---|" + "---:|" * len(columns) + "---|---|",
    ]
    for row in rows:
        cells = [_cell(row["figures"].get(column)) for column in columns]
        met = {None: "", True: "yes", False: "**no**"}[row["is_met"]]
        lines.append(f"| {_cell(row['name'])} | {' | '.join(cells)} | {row['bar'] or ''} | {met} |")
    return lines


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value).replace("|", "\\|").replace("\n", " ")
