"""The examples run as their README says, each in a process of its own."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "3")


def run_example(script, *arguments, tmp, start=()):
    """Run a script of the folder as a user does, but with every warning an error."""
    # The processes that the script starts inherit all of this.
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error",
        "TMPDIR": str(tmp),
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }
    # The tests show JAX several devices; a user's machine has the one.
    environment.pop("XLA_FLAGS", None)
    return subprocess.run(
        [sys.executable, *start, EXAMPLES / script, *map(str, arguments)],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run digits.py once, to the end; return the process, its summary, and the folder."""
    folder = tmp_path_factory.mktemp("digits")
    temporary = folder / "tmp"
    temporary.mkdir()
    process = run_example(
        "digits.py", "--json", folder / "summary.json", "--plot", folder / "loss.png", tmp=temporary
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process, json.loads((folder / "summary.json").read_text()), folder


@pytest.mark.slow
@pytest.mark.xdist_group("examples")
class TestDigits:
    """What digits.py shows, taken from the summary that it writes."""

    def test_every_batch_shares_its_images(self, finished):
        _, summary, _ = finished
        assert summary["batches"] == 15 * (1437 // 64)
        assert summary["shared_batches"] == summary["batches"]

    def test_labels_arrive_as_int32(self, finished):
        assert finished[1]["label_dtype"] == "int32"

    def test_a_new_process_resumes_bit_for_bit(self, finished):
        assert finished[1]["resume_bit_equal"] is True

    def test_torch_is_as_accurate_as_jax(self, finished):
        summary = finished[1]
        assert summary["accuracy_jax"] >= 0.95
        assert summary["accuracy_torch"] == summary["accuracy_jax"]
        assert summary["max_logit_difference"] <= 1e-5

    def test_orbax_alone_restores_bit_for_bit(self, finished):
        assert finished[1]["orbax_bit_equal"] is True

    def test_it_prints_a_passed_row_for_each_check(self, finished):
        process, summary, _ = finished
        rows = re.findall(r"│ (.+?) +│ +(\S+) │ +(\S+) +│", process.stdout)
        assert len(rows) == 7, process.stdout
        assert {verdict for _, _, verdict in rows} == {"ok"}
        count = f"{summary['batches']}/{summary['batches']}"
        assert ("batches that JAX shares with torch", count, "ok") in rows

    def test_it_shows_its_progress(self, finished):
        assert re.search(r"training .*100%", finished[0].stderr)

    def test_the_plot_is_a_png(self, finished):
        plot = (finished[2] / "loss.png").read_bytes()
        assert plot.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(plot) > 5_000

    def test_it_leaves_nothing_behind(self, finished):
        assert list((finished[2] / "tmp").glob("digits-*")) == []


@pytest.mark.slow
@pytest.mark.xdist_group("examples")
def test_too_little_training_fails_and_says_so(tmp_path):
    """A check that fails ends the program with 1 and is named; the rest still holds."""
    process = run_example(
        "digits.py",
        *("--epochs", 1, "--workdir", tmp_path / "kept", "--json", tmp_path / "summary.json"),
        tmp=tmp_path,
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert process.returncode == 1
    accuracy = f"{summary['accuracy_jax']:.1%}"
    assert process.stderr.endswith(f"Failed: test accuracy in JAX: {accuracy}.\n")
    assert summary["resume_bit_equal"] is summary["orbax_bit_equal"] is True
    assert {"train", "test", "halfway", "from_jax", "from_torch"} <= {
        path.name for path in (tmp_path / "kept").iterdir()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "Invalid value for '--epochs'"),
        (["--seed", "1"], "No such option"),
    ],
)
def test_wrong_use_is_refused_before_any_work(arguments, message, tmp_path):
    process = run_example("digits.py", *arguments, tmp=tmp_path)
    assert process.returncode == 2
    assert message in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.slow
@pytest.mark.xdist_group("examples")
def test_both_frameworks_learn_from_one_loader(tmp_path):
    process = run_example("shared_loader.py", tmp=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    found = dict(line.split(": ") for line in process.stdout.splitlines())
    assert float(found["test accuracy in torch"].rstrip("%")) >= 95
    assert float(found["test accuracy in JAX"].rstrip("%")) >= 95
    batches = 20 * -(-1437 // 64)
    assert found["batches in the same memory"] == f"{batches}/{batches}"


@pytest.mark.slow
@pytest.mark.xdist_group("examples")
def test_grain_and_torch_go_on_where_they_stopped(tmp_path):
    process = run_example("grain_and_torch.py", tmp=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    steps = 3 * -(-1797 // 128)
    assert process.stdout.splitlines() == [
        f"grain_for_torch: {steps} losses, after a break the same",
        f"torch_for_jax: {steps} losses, after a break the same",
    ]


@pytest.mark.slow
@pytest.mark.xdist_group("examples")
def test_jax_actors_evaluate_what_torch_learns(tmp_path):
    process = run_example("torch_learner_jax_actors.py", tmp=tmp_path, start=TORCHRUN)
    assert process.returncode == 0, process.stdout + process.stderr
    *steps, last = process.stdout.splitlines()
    right = [float(line.split()[2].rstrip("%")) for line in steps]
    assert len(right) == 5
    assert right[-1] >= 95
    assert last.startswith("largest difference of the logits: ")
    assert float(last.split()[-1]) < 1e-4


PASSED = {
    "batches": 4,
    "shared_batches": 4,
    "label_dtype": "int32",
    "resume_bit_equal": True,
    "accuracy_jax": 0.97,
    "accuracy_torch": 0.97,
    "max_logit_difference": 1e-6,
    "orbax_bit_equal": True,
    "seconds": 1.0,
}


@pytest.mark.parametrize(
    ("measured", "failures"),
    [
        ({}, []),
        ({"shared_batches": 3}, ["batches that JAX shares with torch: 3/4"]),
        ({"label_dtype": "int64"}, ["labels, int64 in torch, in JAX: int64"]),
        ({"resume_bit_equal": False}, ["new process resumes bit for bit: no"]),
        ({"accuracy_torch": 0.96}, ["test accuracy in torch, the same: 96.0%"]),
        ({"max_logit_difference": 2e-5}, ["largest difference of logits: 2.0e-05"]),
        ({"max_logit_difference": float("nan")}, ["largest difference of logits: nan"]),
        ({"orbax_bit_equal": False}, ["Orbax alone restores bit for bit: no"]),
    ],
)
def test_each_check_of_digits_can_fail(measured, failures):
    report = runpy.run_path(str(EXAMPLES / "digits_report.py"))
    assert report["failures"](report["Summary"](**PASSED | measured)) == failures
