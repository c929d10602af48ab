"""`bfl-run --help` says what the config files say; the oracle for keys, values and choices is what Hydra composes."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from bfl_bench.commands.config_files import list_options, read_option
from bfl_bench.groups import GROUPS, PARTS
from bfl_bench.records import config_folder
from tests.composing import COMMAND
from tests.conftest import BflRun

CONF = config_folder()
OPTIONS = {group: list_options(group, [CONF]) for group in GROUPS}


def shown(text: str) -> dict[str, Any]:
    """The keys that a help text shows with their values."""
    found = re.findall(r"^  ([\w.]+)=(.*?)(?:  +# .*)?$", text, re.MULTILINE)
    return {key: yaml.safe_load(value) for key, value in found}


def flat(node: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix: node}
    return {key: value for name, below in node.items() for key, value in flat(below, f"{prefix}.{name}").items()}


def composed(*overrides: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The config, its keys complete, and the options that are chosen."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", list(overrides), return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    return {key: value for name, node in plain.items() for key, value in flat(node, str(name)).items()}, choices


def test_the_groups_are_those_of_the_config() -> None:
    """All but Hydra's own."""
    listed = [next(iter(item)) for item in yaml.safe_load((CONF / "config.yaml").read_text())["defaults"][1:]]
    assert sorted(GROUPS) == sorted(key for key in listed if " " not in key)
    assert set(PARTS) < set(GROUPS)


def test_the_overview_names_every_option_and_key(bfl_run: BflRun) -> None:
    text = bfl_run("--help").out
    for group, names in OPTIONS.items():
        (block,) = re.findall(rf"^{group}\n((?:  .*\n)+)", text, re.MULTILINE)
        lines = [line.split(maxsplit=1) for line in block.splitlines()]
        assert [name for name, _ in lines] == names
        assert all(len(comment) > 5 for _, comment in lines)
    top = (CONF / "config.yaml").read_text()
    for key in re.findall(r"^ *(\w+):", top.split("\n\n", 1)[1].split("hydra:")[0], re.MULTILINE):
        assert re.search(rf"^  +{key}:", text, re.MULTILINE), key
    assert "bfl-run --help method=fola " in text
    assert bfl_run("-h").out == text


@pytest.mark.slow
@pytest.mark.parametrize("index", range(max(len(OPTIONS[group]) for group in PARTS)))
def test_keys_and_values_of_parts_are_those_that_hydra_composes(bfl_run: BflRun, index: int) -> None:
    chosen = {group: OPTIONS[group][index % len(OPTIONS[group])] for group in PARTS}
    words = [f"{group}={name}" for group, name in chosen.items()]
    config, _ = composed(*words)
    result = bfl_run("--help", *words)
    assert result.code == 0
    values = shown(result.out)
    for brought in re.findall(r"^It brings (.*); yours wins", result.out, re.MULTILINE):
        for pair in re.split(r", (?=[\w.]+=)", brought):
            key, _, value = pair.partition("=")
            if key.split(".")[0] in PARTS:  # not those beside the parts
                values[key] = yaml.safe_load(value)
    assert values == {key: value for key, value in config.items() if key.split(".")[0] in PARTS}


DEFAULT = composed()[1]
PRESETS = [(group, name) for group in ("experiment",) for name in OPTIONS[group]]
FEW = ("fola_released", "virtual_released", "bfl_p_released")


@pytest.mark.parametrize(
    ("group", "name"),
    [preset if preset[1] in FEW else pytest.param(*preset, marks=pytest.mark.slow) for preset in PRESETS],
)
def test_presets_set_and_choose_what_hydra_composes(bfl_run: BflRun, group: str, name: str) -> None:
    config, choices = composed(f"{group}={name}")
    text = bfl_run("--help", f"{group}={name}").out
    option = read_option(group, name, [CONF])
    swept = {key: value for key, value in config.items() if key.startswith("hydra.sweeper.params.")}
    values, _, sweep = text.partition("\n\n")[2].partition("It sweeps, with -m:\n")  # behind the comments
    assert {f"hydra.sweeper.params.{key}": str(value) for key, value in shown(sweep).items()} == {
        key: str(yaml.safe_load(str(value))) for key, value in swept.items()
    }
    set_here = shown(values)
    assert set_here == {key: config[key] for key in set_here}
    assert len(set_here) + len(swept) == len(option.entries)
    (chosen,) = re.findall(r"^It chooses (.*);", values, re.MULTILINE) or [""]
    brought = dict(choice.split("=") for choice in chosen.split(", ") if choice)
    brought.pop("brings", None)  # values, not a part
    assert brought == {group: choices[group] for group in brought}
    assert set(brought) >= {group for group in PARTS if choices[group] != DEFAULT[group]}


@pytest.mark.parametrize("group", GROUPS)
def test_no_comment_of_a_file_is_lost(bfl_run: BflRun, group: str) -> None:
    for name in OPTIONS[group]:
        text = " ".join(bfl_run("--help", f"{group}={name}").out.split())
        for line in (CONF / group / f"{name}.yaml").read_text().splitlines():
            comment = " ".join(line.partition("# ")[2].split())
            assert comment.startswith("@package") or comment in text, (name, comment)


def test_an_option_that_builds_on_another(bfl_run: BflRun) -> None:
    own, base = bfl_run("--help", "method=fola_released").out.split("\n\nAs method=fola:\n")
    assert "Its keys:\n  method.name=fola_released\n  method.prior_weight=100.0 " in own
    assert re.search(
        r"^  method.prior_weight=100.0 +# lambda of eq. 16; at 1 the pull is weak, ", own, re.MULTILINE
    )  # the other file's comment
    assert "method.gamma=0.0 " in base
    assert "method.prior_weight" not in base
    niid = bfl_run("--help", "partition=niid_bench").out
    assert re.search(r"alpha=0.5 +# BFL-P's and BA-BFL's code; above 0; the smaller, ", niid)  # its own comment first
    headings = re.findall(r"^(\S.*):(?: .*)?$", niid, re.MULTILINE)
    assert headings == ["Its keys", "As partition=dirichlet", "partition/_sets.yaml"]
    assert "\nmodel/_gaussian.yaml: Gaussian weights, for methods that learn them" in bfl_run("--help", "model=mlp").out


def test_what_an_option_brings(bfl_run: BflRun) -> None:
    assert "\nIt chooses model=lenet; what the command line chooses wins.\n" in bfl_run("--help", "dataset=svhn").out
    assert "\nIt chooses aggregator=rklb; " in bfl_run("--help", "method=fvb").out
    text = bfl_run("--help", "experiment=fola_released").out  # its own method, the rest of experiment=fola
    assert "\nIt chooses dataset=cifar10, model=cnn, partition=dirichlet, method=fola_released; " in text
    assert "It chooses" not in bfl_run("--help", "method=fola").out
    assert (
        ", method=fvb_published, aggregator=rklb; " in bfl_run("--help", "experiment=bfl_p").out
    )  # the method's choice


def test_several_at_once(bfl_run: BflRun) -> None:
    words = ["method=fola", "dataset=har", "local.lr"]
    texts = [bfl_run("--help", word).out.rstrip("\n") for word in words]
    assert bfl_run(*words, "--help").out == "\n\n".join(texts) + "\n"
    assert bfl_run("-m", "method=fola,fedprox", "--help").out == bfl_run("-h", "method=fola", "method=fedprox").out


def test_keys(bfl_run: BflRun) -> None:
    assert bfl_run("--help", "local.clip").out == f"  {'local.clip=null':<36}  # largest gradient norm, or null\n"
    local = bfl_run("--help", "local").out
    assert local.startswith("local  # how a client trains; the same meaning in every method\n  local.epochs=5\n")
    keys = "epochs batch_size lr momentum weight_decay clip optimizer betas schedule".split()
    assert list(shown(local)) == [f"local.{key}" for key in keys]
    assert bfl_run("--help", "local.lr=0.1").out == bfl_run("--help", "local.lr").out
    assert bfl_run("--help", "method.mu").out.startswith("method=fedprox\n  method.mu=0.1 ")
    with_eps = re.findall(r"^method=(\w+)$", bfl_run("--help", "method.eps").out, re.MULTILINE)
    assert with_eps == ["fola", "fola_algorithm1", "fola_eq22", "fola_released"]


def test_a_group(bfl_run: BflRun) -> None:
    text = bfl_run("--help", "engine").out
    assert text.splitlines()[0] == "engine"
    assert re.findall(r"^  (\w+) ", text, re.MULTILINE) == OPTIONS["engine"]
    assert text in bfl_run("--help").out


@pytest.mark.parametrize(
    ("word", "start", "meant"),
    [
        ("method=folla", "method: got 'folla', allowed: bayesadmm, ", "fola"),
        ("partition=_test", "partition: got '_test', allowed: classes, ", None),
        ("metod=fola", "metod: got 'fola', allowed: group=option, a group (dataset, ", "method"),
        ("datasets", "--help: got 'datasets', allowed: group=option, a group (dataset, ", "dataset"),
        ("lr", "--help: got 'lr', allowed: group=option, ", "local.lr or server.lr"),
        ("local.epoch", "--help: got 'local.epoch', allowed: group=option, ", "local.epochs"),
        ("method.gama", "--help: got 'method.gama', allowed: group=option, ", "method.gamma"),
        ("hydra", "--help: got 'hydra', allowed: group=option, ", None),
        ("=", "override: got '=', allowed: key=value", None),
        ("../method=fola", "override: got '../method=fola', allowed: key=value", None),
    ],
)
def test_what_is_not_there(bfl_run: BflRun, word: str, start: str, meant: str | None) -> None:
    result = bfl_run("--help", word)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"bfl-run: {start}")
    assert result.err.count("\n") == 1
    assert result.err.endswith(f" (did you mean {meant}?)\n") == (meant is not None)


def test_options_of_ones_own(bfl_run: BflRun, tmp_path: Path) -> None:
    (tmp_path / "conf" / "method").mkdir(parents=True)
    (tmp_path / "conf" / "method" / "mine.yaml").write_text(
        "# Mine, with noise\n"
        "# and a second line\n"
        "defaults: [fedprox, _self_]\n"
        "_target_: my.Mine\n"
        "# what this does\n"
        "#   in two lines\n"
        "deviation:\n"
        "  start: 0.1   # above 0\n"
        "  factors:\n"
        "    - 'a # b'  # no comment inside quotes\n"
        "    - 2\n"
        "  empty:\n"
    )
    text = bfl_run("--help", "--config-dir", "conf", "method=mine").out
    assert text.startswith(
        "method=mine\n  Mine, with noise\n  and a second line\n\nIts keys:\n  method._target_=my.Mine"
    )
    assert re.search(r"^  method.deviation.start=0.1 +# above 0$", text, re.MULTILINE)
    assert "  method.deviation.factors=['a # b', 2]\n" in text
    assert "  method.deviation.empty=null\n" in text
    assert "\n\nAs method=fedprox:\n  method.name=fedprox\n" in text
    assert re.search(r"^  mine +Mine, with noise$", bfl_run("--help", "-cd", "conf").out, re.MULTILINE)
    assert bfl_run("--help", "method=mine").code == 2
    nowhere = bfl_run("--help", "--config-dir", "nowhere")
    assert nowhere.err == "bfl-run: --config-dir: got 'nowhere', allowed: a folder with config files\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [1\nb: 2\n", "{path}: got 'line 2', allowed: YAML ("),
        ("just text\n", "{path}: got 'just text', allowed: keys with values"),
        ("defaults: [nope]\n", "defaults of method/own: got 'method/nope', allowed: another file"),
        ("defaults: [own]\n", "defaults of method/own: got 'method/own', allowed: another file"),
    ],
)
def test_wrong_files_of_ones_own(bfl_run: BflRun, tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "method" / "own.yaml"
    path.parent.mkdir()
    path.write_text(text)
    result = bfl_run("--help", "--config-dir", str(tmp_path), "method=own")
    assert result.code == 2
    assert result.err.startswith("bfl-run: " + sentence.format(path=path))


def test_help_needs_neither_torch_nor_hydra() -> None:
    for words in (["--version"], ["--help"], ["--help", "method=fola_released", "local.lr", "method.mu"]):
        code = f"import sys; sys.argv = ['bfl-run', *{words}]; from bfl_bench.commands.run import main; main(); "
        code += "sys.exit(bool({'torch', 'hydra', 'omegaconf'} & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0
        assert "bfl" in done.stdout


def test_a_reader_that_has_gone_is_no_problem(tmp_path: Path) -> None:
    command = f"{shlex.quote(COMMAND)} --help | head -n 1"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("bfl-run [key=value ...]")
