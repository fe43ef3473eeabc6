"""What `digits.py` measured, and how it is shown."""

import json
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table


class Summary(NamedTuple):
    """What was measured. `--json` writes it."""

    batches: int
    shared_batches: int
    label_dtype: str
    resume_bit_equal: bool
    accuracy_jax: float
    accuracy_torch: float
    max_logit_difference: float
    orbax_bit_equal: bool
    seconds: float


class Check(NamedTuple):
    """A row of the table: what was checked, what was found, and whether it is as it has to be."""

    what: str
    found: str
    passed: bool


def checks(s: Summary) -> list[Check]:
    """Hold the measured values against what they have to be."""
    all_shared, same = s.shared_batches == s.batches, s.accuracy_torch == s.accuracy_jax
    return [
        Check("batches that JAX shares with torch", f"{s.shared_batches}/{s.batches}", all_shared),
        Check("labels, int64 in torch, in JAX", s.label_dtype, s.label_dtype == "int32"),
        Check("new process resumes bit for bit", yes(s.resume_bit_equal), s.resume_bit_equal),
        Check("test accuracy in JAX", f"{s.accuracy_jax:.1%}", s.accuracy_jax >= 0.95),
        Check("test accuracy in torch, the same", f"{s.accuracy_torch:.1%}", same),
        Check(
            "largest difference of logits",
            f"{s.max_logit_difference:.1e}",
            s.max_logit_difference <= 1e-5,
        ),
        Check("Orbax alone restores bit for bit", yes(s.orbax_bit_equal), s.orbax_bit_equal),
    ]


def yes(value: bool) -> str:
    """Write a truth value as people do."""
    return "yes" if value else "no"


def failures(summary: Summary) -> list[str]:
    """Name the checks that failed, and what they found."""
    return [f"{c.what}: {c.found}" for c in checks(summary) if not c.passed]


def show(summary: Summary, json_file: Path | None = None) -> None:
    """Print the table; write the summary as JSON if there is a file for it."""
    table = Table(title="One model in torch and JAX")
    table.add_column("check")
    table.add_column("found", justify="right")
    table.add_column("", justify="center")
    for check in checks(summary):
        table.add_row(
            check.what, check.found, "[green]ok[/green]" if check.passed else "[red]FAILED[/red]"
        )
    table.caption = f"{summary.seconds:.1f} seconds"
    Console().print(table)
    if json_file:
        json_file.write_text(json.dumps(summary._asdict(), indent=2) + "\n")


def plot_losses(losses: list[float], file: Path) -> None:
    """Draw the loss of each step."""
    import matplotlib as mpl

    mpl.use("Agg")  # draws into files, needs no display
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.semilogy(losses, linewidth=0.8)
    axes.set(xlabel="step", ylabel="training loss")
    figure.savefig(file, format="png", dpi=150)
