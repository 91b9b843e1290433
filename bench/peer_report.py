"""Results of `bench/peers.py`: summed up, merged, read, written, and shown as tables.

A result is plain JSON: `engines` by name, `rows` by name (an engine, or an engine with `PRIMED`),
in them a cell for each workload with its runs. A run has a `value` in the workload's unit, or
says why not: `cut_off`, `not_run` or `error`.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
from workloads import WORKLOADS, Workload

PRIMED = " (primed)"
FLOAT32_REFERENCE = "sapwood-f32"
Result = dict[str, Any]
Rows = dict[str, dict[str, dict[str, Any]]]


def summarised(runs: Mapping[str, Mapping[str, Sequence[dict[str, Any]]]]) -> Rows:
    """Cells with median and range over the runs that have a value."""
    rows: Rows = {}
    for row, by_workload in runs.items():
        for workload, its_runs in by_workload.items():
            values = [run["value"] for run in its_runs if "value" in run]
            cell: dict[str, Any] = {"runs": list(its_runs)}
            if values:
                cell |= {
                    "median": statistics.median(values),
                    "min": min(values),
                    "max": max(values),
                }
            rows.setdefault(row, {})[workload] = cell
    return rows


def merged(committed: Result, measured: Result) -> Result:
    """`committed` with the cells of `measured` that were run in the place of its own.

    The larger peak of memory is kept, as a part of the workloads may need less. Raises ValueError
    where they are of different machines.
    """
    if not committed:
        return measured
    for what in ("processor", "num_threads"):
        if committed["machine"][what] != measured["machine"][what]:
            raise ValueError(f"the committed results have another {what}; make a full run")
    rows: Rows = {row: dict(cells) for row, cells in committed["rows"].items()}
    for row, cells in measured["rows"].items():
        for workload, cell in cells.items():
            if any("not_run" not in run for run in cell["runs"]):
                rows.setdefault(row, {})[workload] = cell
    engines = dict(committed["engines"])
    for name, engine in measured["engines"].items():
        if "title" in engine:
            peak = max(engine["peak_bytes"], engines.get(name, {}).get("peak_bytes", 0))
            engines[name] = engine | {"peak_bytes": peak}
    workloads = committed["workloads"] | measured["workloads"]
    return committed | {"rows": rows, "engines": engines, "workloads": workloads}


def read(path: Path) -> Result:
    """Empty where there is no such file."""
    if not path.exists():
        return {}
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    return result


def write(path: Path, result: Result) -> None:
    """The whole as JSON and Markdown, a JSON file for each engine in a folder beside it, and where
    these are the project's results, the README's table."""
    common.write_json(path, result)
    path.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
    readme = common.ROOT / "README.md"
    if path == common.RESULTS / path.name:
        filled = common.fill(readme.read_text(encoding="utf-8"), "peers", summary(result))
        readme.write_text(filled, encoding="utf-8")
    folder = path.with_suffix("")
    for name, engine in result["engines"].items():
        rows = {row: cells for row, cells in result["rows"].items() if _engine_of(row) == name}
        one = {key: value for key, value in result.items() if key not in ("engines", "rows")}
        common.write_json(folder / f"{name}.json", one | {"engine": engine, "rows": rows})


def figure(run: Mapping[str, Any], workload: Workload) -> str:
    """A run or a cell in a few characters, without its unit."""
    value = run.get("median", run.get("value"))
    if value is not None:
        return _number(value)
    if "runs" in run:
        return figure(run["runs"][0], workload)
    if "cut_off" in run:
        # Of a rate only the time it would have come from is known.
        return f"> {run['cut_off']:.0f}" + (" s" if workload.more_is_better else "")
    return "not run" if "not_run" in run else "failed"


def markdown(result: Result) -> str:
    """The table of all engines, Sapwood against the best of them, and how to read both."""
    machine = result["machine"]
    parts = [
        "# Sapwood and its peers on two CPU cores",
        f"{result['model']}; {machine['processor']}, {machine['num_threads']} threads; "
        f"{result['time'][:10]}, {result['minutes']} minutes in all. Made by `python "
        "bench/peers.py`; numbers of every run are in the JSON files beside this one.",
        "Median, and the range where there are several runs; the best of a column in bold (primed "
        "rows do not compete). tok/s: more is better. s: less is better. "
        f'"> {result["settings"]["cut_off_seconds"]:.0f}": cut off there. Peak is the largest '
        "resident size of the engine's processes, ready the time from starting its process until "
        "it can answer.",
        _main_table(result),
        "\n".join(
            f"- **{name}**: {workload['title']}" for name, workload in result["workloads"].items()
        ),
        "Primed: the client sends the shared prefixes first, one by one, within the time.",
        "## Sapwood against the best peer",
        "Ratio of the figures, Sapwood / peer: below 1 is better for s, above 1 for tok/s.",
        _ratio_table(result),
        "## Engines",
        _engine_table(result),
    ]
    return "\n\n".join(parts) + "\n"


def summary(result: Result) -> str:
    """The README's table: Sapwood beside the best of the others in each workload."""
    engines = result["engines"]
    ours = [row for row in _in_order(result) if engines[_engine_of(row)]["is_sapwood"]]

    def is_peer(row: str) -> bool:
        return not engines[_engine_of(row)]["is_sapwood"] and PRIMED not in row

    def described(row: str | None, name: str) -> str:
        if row is None:
            return ""
        engine = engines[_engine_of(row)]
        value = _number(result["rows"][row][name]["median"])
        dtype = "" if engine["weights"] in engine["title"] else f", {engine['weights']}"
        return f"{value} ({engine['title']}{dtype})"

    lines = [
        f"| | | {' | '.join(engines[row]['title'] for row in ours)} | best of the others | ratio "
        "| best of the others in float32 | ratio |",
        "|---" * (len(ours) + 6) + "|",
    ]
    for name, workload in result["workloads"].items():
        best = _best(result, name, lambda row: row in ours)
        peer = _best(result, name, is_peer)
        best32 = _best(result, name, lambda row: row in ours and engines[row]["is_float32"])
        peer32 = _best(result, name, lambda row: is_peer(row) and engines[row]["is_float32"])
        cells = [
            figure(result["rows"][row][name], WORKLOADS[name])
            if name in result["rows"][row]
            else ""
            for row in ours
        ]
        columns = [
            f"**{name}** {workload['title']}",
            workload["unit"],
            *cells,
            described(peer, name),
            _ratio(result, best, peer, name),
            described(peer32, name),
            _ratio(result, best32, peer32, name),
        ]
        lines.append(f"| {' | '.join(columns)} |")
    costs = [
        f"{engines[row]['peak_bytes'] / 1e9:.1f} GB, {engines[row]['ready_seconds']:.1f} s"
        for row in ours
    ]
    lines.append(f"| peak memory, time to ready | | {' | '.join(costs)} | | | | |")
    machine = result["machine"]
    primed = {
        name: described(row, name)
        for name in result["workloads"]
        if (row := _best(result, name, lambda row: PRIMED in row)) is not None
    }
    lines += [
        "",
        f"{result['model']}; {machine['processor']}, {machine['num_threads']} threads, "
        f"{result['time'][:10]}. tok/s: more is better; s: less is better. Ratio: Sapwood's better "
        "mode / the other. int8 and Q4_0 are weights; of activations and caches, all engines and "
        "all runs [bench/results/peers-cpu.md](bench/results/peers-cpu.md) tells. Where a client "
        "sends the shared prefixes first, by itself, the best of the others takes, in seconds: "
        f"{'; '.join(f'{name} {figures}' for name, figures in primed.items())}.",
    ]
    return "\n".join(lines)


def against_committed(measured: Result, committed: Result) -> str:
    """Each cell of a run beside its last committed figure."""
    lines = ["| engine | workload | now | committed | now / committed |", "|---|---|---|---|---|"]
    for row, cells in measured["rows"].items():
        for name, cell in cells.items():
            workload = WORKLOADS[name]
            before = committed.get("rows", {}).get(row, {}).get(name, {})
            ratio = "-"
            if "median" in before and "median" in cell:
                ratio = f"{cell['median'] / before['median']:.2f}"
            old = f"{figure(before, workload)} {workload.unit}" if before else "-"
            now = f"{figure(cell, workload)} {workload.unit}"
            lines.append(f"| {row} | {name} | {now} | {old} | {ratio} |")
    return "\n".join(lines)


def _main_table(result: Result) -> str:
    names = list(result["workloads"])
    bests = {name: _best(result, name, lambda row: PRIMED not in row) for name in names}
    heads = [f"{name} {result['workloads'][name]['unit']}" for name in names]
    lines = [
        f"| engine | weights / activations / KV | {' | '.join(heads)} | peak GB | ready s |",
        "|---" * (len(names) + 4) + "|",
    ]
    for row in _in_order(result):
        cells = result["rows"][row]
        engine = result["engines"][_engine_of(row)]
        is_primed = PRIMED in row
        figures = [
            _cell(cells[name], WORKLOADS[name], is_best=bests[name] == row) if name in cells else ""
            for name in names
        ]
        dtypes = f"{engine['weights']} / {engine['activations']} / {engine['kv_cache']}"
        title = engine["title"] + (PRIMED if is_primed else "")
        costs = "| |" if is_primed else _costs(engine)
        lines.append(f"| {title} | {dtypes} | {' | '.join(figures)} {costs}")
    lines += [
        f"| {name} | {'|' * (len(names) + 2)} not run: {engine['failed']} |"
        for name, engine in result["engines"].items()
        if "failed" in engine
    ]
    return "\n".join(lines)


def _in_order(result: Result) -> list[str]:
    """The rows of engines that ran, each engine's primed row after its other one."""
    return [
        row
        for name, engine in result["engines"].items()
        if "title" in engine
        for row in (name, name + PRIMED)
        if row in result["rows"]
    ]


def _costs(engine: Mapping[str, Any]) -> str:
    return f"| {engine['peak_bytes'] / 1e9:.1f} | {engine['ready_seconds']:.1f} |"


def _cell(cell: Mapping[str, Any], workload: Workload, *, is_best: bool) -> str:
    text = figure(cell, workload)
    if is_best:
        text = f"**{text}**"
    if sum("value" in run for run in cell["runs"]) > 1:
        text += f" ({_number(cell['min'])} to {_number(cell['max'])})"
    return text


def _ratio_table(result: Result) -> str:
    lines = [
        "| workload | Sapwood's best | best peer | ratio | Sapwood float32 | best float32 peer "
        "| ratio | best primed peer | ratio of the best |",
        "|---" * 9 + "|",
    ]
    engines = result["engines"]

    def is_peer(row: str) -> bool:
        return not engines[_engine_of(row)]["is_sapwood"]

    def is_float32(row: str) -> bool:
        return bool(engines[_engine_of(row)]["is_float32"])

    for name in result["workloads"]:
        best = _best(result, name, lambda row: not is_peer(row))
        peer = _best(result, name, lambda row: is_peer(row) and PRIMED not in row)
        ours32 = _best(result, name, lambda row: not is_peer(row) and is_float32(row))
        peer32 = _best(
            result, name, lambda row: is_peer(row) and is_float32(row) and PRIMED not in row
        )
        primed = _best(result, name, lambda row: PRIMED in row)
        columns = [
            f"{name} ({WORKLOADS[name].unit})",
            *(_named(result, row, name) for row in (best, peer)),
            _ratio(result, best, peer, name),
            *(_named(result, row, name) for row in (ours32, peer32)),
            _ratio(result, ours32, peer32, name),
            _named(result, primed, name),
            _ratio(result, best, primed, name),
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def _engine_table(result: Result) -> str:
    lines = [
        "| engine | versions | m: right | first tokens as in Sapwood's float32 | in chats (s) |",
        "|---" * 5 + "|",
    ]
    for name, engine in result["engines"].items():
        if "title" not in engine:
            continue
        versions = ", ".join(f"{key} {value}" for key, value in engine["versions"].items())
        alone = _agreement(result, name, [key for key in result["workloads"] if key != "s"])
        chats = _agreement(result, name, ["s"])
        lines.append(
            f"| {engine['title']} | {versions} | {_marks(result, name)} | {alone} | {chats} |"
        )
    return "\n".join(lines)


def _marks(result: Result, row: str) -> str:
    for run in result["rows"].get(row, {}).get("m", {}).get("runs", []):
        if "letters" in run:
            return f"{run['num_right']} of {len(run['letters'])}"
    return ""


def _agreement(result: Result, row: str, workloads: Sequence[str]) -> str:
    """How many requests got the same first token in float32 Sapwood, of those that both answered.

    In chats a difference also changes the prompts of later turns.
    """
    equal = total = 0
    for name in workloads:
        runs, theirs = (
            {
                run["repetition"]: run["first_token_ids"].split()
                for run in result["rows"].get(which, {}).get(name, {}).get("runs", [])
                if "value" in run
            }
            for which in (row, FLOAT32_REFERENCE)
        )
        for repetition in runs.keys() & theirs.keys():
            pairs = zip(runs[repetition], theirs[repetition], strict=True)
            same = [one == other for one, other in pairs]
            equal += sum(same)
            total += len(same)
    return f"{equal} of {total}" if total else ""


def _best(result: Result, workload: str, takes_part: Callable[[str], bool]) -> str | None:
    medians: dict[str, float] = {
        row: cells[workload]["median"]
        for row in _in_order(result)
        if "median" in (cells := result["rows"][row]).get(workload, {}) and takes_part(row)
    }
    if not medians:
        return None
    pick = max if WORKLOADS[workload].more_is_better else min
    return pick(medians, key=lambda row: medians[row])


def _ratio(result: Result, ours: str | None, theirs: str | None, workload: str) -> str:
    if ours is None or theirs is None:
        return ""
    rows = result["rows"]
    return f"{rows[ours][workload]['median'] / rows[theirs][workload]['median']:.2f}"


def _named(result: Result, row: str | None, workload: str) -> str:
    if row is None:
        return ""
    return f"{_number(result['rows'][row][workload]['median'])} {row.removesuffix(PRIMED)}"


def _engine_of(row: str) -> str:
    return row.removesuffix(PRIMED)


def _number(value: float) -> str:
    """Three digits that mean something."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"
