"""With a torch that lacks what is expected of it, the job runs all the same, and one line says what goes without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from warm_launcher import WarmLaunchers

from unicron_elastic.compat.expectations import EXPECTATIONS, Expectation, Feature
from unicron_elastic.launcher.stepping_aside import _without_own

HERE = Path(__file__).parent
ONE_OF_EACH = {each.part: each for each in reversed(EXPECTATIONS)}


class Done:
    """A job that has ended."""

    def __init__(self, out: str, err: str) -> None:
        self.err = err
        assert "\nTraceback" not in f"\n{err}", err  # but for those of a script, "[rank0]: Traceback"
        (self.result,) = [line for line in out.splitlines() if line.startswith("DONE")]
        self.told = [line for line in err.splitlines() if line.startswith("unicron-run: ")]

    @property
    def goes_on_in_place(self) -> bool:
        """Whether the survivor did."""
        return "goes on from the failed step" in self.err


def command(*arguments: str, ranks: int = 2) -> list[str]:
    options = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=2", *arguments]
    return [str(HERE / "pretend.py"), *options, str(HERE / "train_small.py")]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """torch's own agent needs the first variable for a restart on gloo."""
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(HERE), "XDG_STATE_HOME": str(folder)}
    return {**own, **more}


@pytest.fixture
def run(tmp_path: Path, warm_launchers: WarmLaunchers) -> Callable[..., Done]:
    """Runs the job to its end, with a torch of which all of ours that is imported sees what is pretended."""

    def to_its_end(*arguments: str, ranks: int = 2, **environ: str) -> Done:
        done = warm_launchers.script(*command(*arguments, ranks=ranks), **environment(tmp_path, **environ))
        assert done.returncode == 0, done.stderr
        return Done(done.stdout, done.stderr)

    return to_its_end


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_launchers: WarmLaunchers) -> Done:
    """Of the torch that is installed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    said = folder / "said"
    process = warm_launchers.begin(said, *command(), **environment(folder))
    assert process.wait(100) == 0, said.read_text()
    return Done(said.read_text(), said.read_text())


def test_with_a_torch_that_is_known_nothing_is_said(undisturbed: Done) -> None:
    assert undisturbed.told == []
    assert undisturbed.goes_on_in_place


def check_runs_without(missing: list[Expectation], run: Callable[..., Done], undisturbed: Done) -> None:
    hidden = [path for each in missing for path in (each.path, each.orelse) if path]
    ranks = 1 if Feature.AGENT in {each.part for each in missing} else 2  # each of which imports torch anew then
    done = run(ranks=ranks, PRETEND=",".join(hidden), PRETEND_KNOWN="2.10")
    assert done.result == undisturbed.result
    (line,) = done.told
    assert " is newer than what this version knows (2.10): " in line
    assert f" {missing[0].path.replace(':', '.')} is not there" in line
    assert all(each.part.value in line for each in missing)
    assert done.goes_on_in_place == {Feature.AGENT, Feature.IN_PLACE}.isdisjoint(each.part for each in missing)


@pytest.mark.parametrize(
    "parts",
    [{Feature.AGENT}, {Feature.IN_PLACE}, set(Feature) - {Feature.AGENT, Feature.IN_PLACE}],
    ids=["agent", "in-place", "all-others"],
)
def test_without_a_part_the_job_runs(parts: set[Feature], run: Callable[..., Done], undisturbed: Done) -> None:
    check_runs_without([ONE_OF_EACH[part] for part in Feature if part in parts], run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("missing", EXPECTATIONS, ids=lambda each: f"{each.part.name}-{each.path}")
def test_without_anything_of_the_table_the_job_runs(
    missing: Expectation, run: Callable[..., Done], undisturbed: Done
) -> None:
    check_runs_without([missing], run, undisturbed)


@pytest.mark.slow
def test_a_newer_torch_that_lacks_nothing_is_not_spoken_of(run: Callable[..., Done]) -> None:
    done = run(PRETEND_KNOWN="2.10")
    assert (done.told, done.goes_on_in_place) == ([], True)


@pytest.mark.parametrize("what", ["start", pytest.param("agent", marks=pytest.mark.slow), "parser"])
def test_what_nobody_foresaw_is_left_to_torchs_own_agent(
    what: str, run: Callable[..., Done], undisturbed: Done
) -> None:
    """As torch 2.15 was for a version that knew 2.13: a private function that takes another argument."""
    done = run("--unicron-console=plain", ranks=1, PRETEND_BROKEN=what, PRETEND_KNOWN="2.10")
    assert done.result == undisturbed.result
    line = done.told[0]
    assert "torch's own agent runs the job" in line
    assert ("gpu_index" in line) == (what != "agent")
    assert len(done.told) == 1
    assert not done.goes_on_in_place


def test_options_of_ours_are_kept_from_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    line = ["--nnodes", "2", "--unicron-warm", "off", "--unicron-ledger=x", "--detach", "--metrics-port=1", "-m"]
    assert list(_without_own([*line, "package", "-x"])) == ["--nnodes", "2", "-m", "package", "-x"]
    own = [str(script), "--config", "mine", "--unicron-warm"]
    assert list(_without_own(["--config", "a.yaml", *own])) == own
