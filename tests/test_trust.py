"""What is executed and what is not: run folders are data, and so is the working directory until a config names it."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from bfl_bench import records
from bfl_bench.build import reload
from bfl_bench.build.parts import is_own
from bfl_bench.errors import RunError
from tests.composing import COMMAND, SMALL, only_folder
from tests.conftest import BflRun


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    ["os.system", "bfl_bench.data.sources.fetching.subprocess.run", "bfl_bench.build.loading.Path", "builtins.eval", 3],
)
def test_a_run_folder_cannot_name_foreign_code(target: object, bfl_run: BflRun, tmp_path: Path) -> None:
    """Wherever it stands in the config; the file that it would make is not made."""
    assert bfl_run(*SMALL, "method=fedavg", "rounds=1").code == 0
    folder = only_folder(tmp_path / "outputs")
    config = yaml.safe_load((folder / records.CONFIG).read_text())
    for place in ("method", "eval"):
        changed = config | {place: config[place] | {"extra": {"_target_": target, "command": "touch made"}}}
        (folder / records.CONFIG).write_text(yaml.safe_dump(changed))
        with pytest.raises(RunError, match="which is no part of bfl-bench"):
            reload(folder)
    assert not Path("made").exists()


def test_own_parts_are_own() -> None:
    assert is_own("bfl_bench.methods.fedavg.FedAvg")
    assert is_own("bfl_bench.aggregators.rklb")
    assert is_own("bfl_bench.models.networks.lenet")
    assert not is_own("bfl_bench.methods.nothing.Nothing")


@pytest.mark.slow
def test_plugins_in_the_working_directory_are_not_executed(tmp_path: Path) -> None:
    """But a module of one's own there is found when a config names it."""
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "evil.py").write_text("from pathlib import Path\nPath('made').touch()\n")
    (tmp_path / "mine.py").write_text("from bfl_bench.methods.fedavg import FedAvg\n\nclass Mine(FedAvg):\n    pass\n")
    own = ["method=fedavg", "method._target_=mine.Mine", "dry_run=true"]
    result = subprocess.run([COMMAND, *SMALL, *own], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "made").exists()
    shutil.rmtree(tmp_path / "hydra_plugins")
