"""Whatever is wrong with a command line ends in one sentence, `bfl-run: key: got X, allowed: Y`, and writes nothing."""

import re
from pathlib import Path

import pytest

from tests.conftest import BflRun, Result

HYDRAS_OWN = ("hydra.cc", "Traceback", "LexerNoViable", "--multirun to your", "usage:", "Config search path")
READ = "a number, a text, [a list] or {keys: values}"
NO_KEY = "no such key; the keys are "
UNRESOLVED = "a value, or the name of another key as in ${local.lr} ("


def check_sentence(result: Result, key: str, got: str, allowed: str) -> None:
    assert result.code == 2, result
    assert result.out == ""
    assert result.err.startswith(f"bfl-run: {key}: got {got}, allowed: {allowed}"), result.err
    assert re.fullmatch(r"[^\n]*\S\n", result.err), "one line"
    assert not [text for text in HYDRAS_OWN if text in result.err], result.err


OPTIONS = [
    (["-x"], "option", "'-x'", "--help (-h), --version, --multirun (-m), "),
    (["-"], "option", "'-'", "--help"),
    (["--"], "option", "'--'", "--help"),
    (["-1"], "option", "'-1'", "--help"),
    (["--multirum"], "option", "'--multirum'", "--help"),
    (["--multirun=3"], "--multirun", "'3'", "no value"),
    (["--config-dir"], "--config-dir", "''", "a folder with config files"),
    (["--config-dir", "nowhere"], "--config-dir", "'nowhere'", "a folder with config files"),
    (["--config-dir=nowhere"], "--config-dir", "'nowhere'", "a folder with config files"),
    (["-cd", "nowhere", "seed=1"], "--config-dir", "'nowhere'", "a folder with config files"),
    (["--config-name", "x"], "--config-name", "'x'", "config, or the name of a file in the folder of --config-dir"),
    (["--config-name"], "--config-name", "''", "config, or"),
    (["-cp", "x"], "--config-path", "'x'", "the absolute path of a folder"),
    (["--cfg"], "--cfg", "''", "job, hydra, all"),
    (["--cfg", "jobs"], "--cfg", "'jobs'", "job, hydra, all (did you mean job?)"),
    (["--info", "xyz"], "--info", "'xyz'", "all, config, defaults, defaults-tree, plugins, searchpath"),
    (["--resolve"], "--resolve", "'--resolve'", "only together with --cfg"),
    (["--package", "local"], "--package", "'--package local'", "only together with --cfg"),
    (["--cfg", "job", "--package"], "--package", "''", "a group of keys, such as local"),
    (["--cfg", "job", "--package", "lokal"], "--package", "'lokal'", NO_KEY + "seed, "),
    (["--run", "-m"], "option", "'--run --multirun'", "one of these at a time"),
    (["--experimental-rerun", "x"], "--experimental-rerun", "'--experimental-rerun'", "a command line instead"),
    (["--experimental-rerun=x"], "--experimental-rerun", "'--experimental-rerun=x'", "a command line instead"),
    (["-sc"], "--shell-completion", "''", "install=SHELL, "),
    (["-sc", "install=dos"], "--shell-completion", "'install=dos'", "install=SHELL, "),
]

WORDS = [  # that are no key=value
    "", "=", "=1", ".", ".=1", ".seed=1", "seed.=1", "local..lr=1", "@=1", "method:fola", "seed->1", "seed:=1",
    "method =fola", " method=fola", "model.hidden[0]=3", "ünï=1", "3", "1=2", "+", "~", "[seed=1]", "/method=fola",
]  # fmt: skip

UNREADABLE = [
    "'1", '"1', "1'", "(1", "1)", "[1", "1]", "{a:1", "{1", "a]b", "a=b", "=1", "!", "#", "^", "&", "<", "a,", ",a",
    "foo(1)", "int(a)", "tag(a,1)", "[1,2}", "${", "${}", "${a", "${a}b${", "a\nb",
]  # fmt: skip

METHODS = "bayesadmm, bayesadmm_released, bcm, bcm_same, bcm_split, "
CHOICES = [
    ("method=xyz", "method", "'xyz'", METHODS),
    ("method=folla", "method", "'folla'", METHODS),
    ("method=", "method", "''", METHODS),
    ("method", "method", "'method'", f"method=NAME; NAME is {METHODS}"),
    ("method=null", "method", "'null'", METHODS),
    ("method=true", "method", "'true'", METHODS),
    ("method=1", "method", "'1'", METHODS),
    ("method=~", "method", "'~'", METHODS),
    ("method=???", "method", "'???'", METHODS),
    ("method='fola", "method", '"\'fola"', METHODS),
    ("method=fola.yaml", "method", "'fola.yaml'", METHODS),
    ("method=ünï", "method", "'ünï'", METHODS),
    ("method=fola method.eps=1", "method", "'fola method.eps=1'", METHODS),
    ("method=[a]", "method", "'[a]'", METHODS),
    ("method=[fola]", "method", "'[fola]'", METHODS),
    ("method=[fola,fedavg]", "method", "'[fola,fedavg]'", METHODS),
    ("method={}", "method", "'{}'", "{key: value}, or the keys one by one, method.KEY=VALUE"),
    ("+method=fola", "method", "'+method=fola'", f"method=NAME; NAME is {METHODS}"),
    ("++method=fola", "method", "'++method=fola'", f"method=NAME; NAME is {METHODS}"),
    ("~method", "method", "'~method'", f"method=NAME; NAME is {METHODS}"),
    ("~method=fedavg", "method", "'~method=fedavg'", f"method=NAME; NAME is {METHODS}"),
    ("method=fola,fedavg", "method", "'fola,fedavg'", "one name; -m runs every combination of several"),
    ("model=_gaussian", "model", "'_gaussian'", "augmented, cnn, conv, conv3, "),
    ("dataset=minst", "dataset", "'minst'", "abalone, auto_mpg, bike, "),
    ("partition=_test", "partition", "'_test'", "classes, dirichlet, "),
    ("engine=xyz", "engine", "'xyz'", "processes, ray, sequential, stacked"),
    ("aggregator=null", "aggregator", "'null'", "aalv, "),
    ("experiment=xyz", "experiment", "'xyz'", "ba_bfl, ba_bfl_released, "),
    ("experiment=[fola]", "experiment", "'[fola]'", "ba_bfl, ba_bfl_released, "),
    ("scale=xyz", "scale", "'xyz'", "cpu, paper, smoke"),
    ("method/fola", "method/fola", "'method/fola'", "method/fola=VALUE"),
    ("method/fola=1", "method/fola", "'1'", "no such group; the groups are dataset, partition, "),
    ("local/lr=1", "local/lr", "'1'", "no such group; the groups are dataset, partition, "),
    ("dataset@foo=mnist", "dataset@foo", "'dataset@foo=mnist'", "dataset=NAME; a group has one place"),
    ("dataset@=mnist", "dataset@", "'dataset@=mnist'", "dataset=NAME; a group has one place"),
    ("+dataset@foo:bar=mnist", "dataset@foo:bar", "'+dataset@foo:bar=mnist'", "dataset=NAME; a group has one place"),
    ("~dataset@foo", "dataset@foo", "'~dataset@foo'", "dataset=NAME; a group has one place"),
    ("hydra/launcher=xyz", "hydra/launcher", "'xyz'", "basic"),
]

VALUES = [
    ("foo=1", "foo", "'1'", NO_KEY + "seed, rounds, "),
    ("foo", "foo", "'foo'", "foo=VALUE"),
    ("local.foo=1", "local.foo", "'1'", NO_KEY + "epochs, batch_size, "),
    ("local.lr.x=1", "local.lr.x", "'1'", "no such key; local.lr has none below it, it is 0.1"),
    ("+local.foo=1", "local.foo", "1", NO_KEY + "epochs, batch_size, "),
    ("+local.lr=1", "local.lr", "'+local.lr=1'", "local.lr=1; the key is there already"),
    ("~foo", "foo", "'~foo'", NO_KEY + "seed, rounds, "),
    ("~local", "local", "'~local'", "local=VALUE; it cannot be left out"),
    ("~local.lr", "local.lr", "'~local.lr'", "local.lr=VALUE; it cannot be left out"),
    ("~method.eps=3", "method.eps", "'~method.eps=3'", "~method.eps, without a value"),
    ("method={a:1}", "method.a", "'{a:1}'", NO_KEY + "_target_, name, weights, "),
    ("local={}", "local", "'{}'", "{key: value}, or the keys one by one, local.KEY=VALUE"),
    ("local=[]", "local", "'[]'", "its keys one by one: local.epochs, local.batch_size, "),
    ("local.lr=abc", "local.lr", "'abc'", "a number above 0"),
    ("local.lr=1,2", "local.lr", "'1,2'", "one value, or [a,b] for a list; -m runs every combination of several"),
    ("seed=range(1,3)", "seed", "'range(1,3)'", "one value, or [a,b] for a list; -m runs"),
    ("seed=sort(3,1)", "seed", "'sort(3,1)'", "one value, or [a,b] for a list; -m runs"),
    ("seed=glob(*)", "seed", "'glob(*)'", "one value, or [a,b] for a list; -m runs"),
    ("seed=null", "seed", "null", "a whole number of at least 0"),
    ("seed=???", "seed", "'???'", "a value; the key has no default"),
    ("model.hidden.x=1", "model.hidden.x", "'1'", "no such key; model.hidden has none below it, it is [200, 200]"),
    ("method.gamma=${nope}", "method.gamma", "'${nope}'", UNRESOLVED),
    ("hydra=1", "hydra", "'1'", "Hydra's keys one by one, hydra.KEY=VALUE"),
    ("~hydra", "hydra", "'~hydra'", "Hydra's keys one by one, hydra.KEY=VALUE"),
    ("hydra.job.chdir=foo", "hydra.job.chdir", "'foo'", "a value such as false ("),
    ("hydra.run.dir=${nope}", "hydra.run.dir", "'${nope}'", UNRESOLVED),
    ("hydra.sweeper=3", "hydra.sweeper", "'3'", "its keys one by one, hydra.sweeper.KEY=VALUE"),
    ("hydra.launcher={_target_: os.getcwd}", "hydra.launcher", "'{_target_: os.getcwd}'", "hydra/launcher=NAME and"),
    ("+hydra.x={_target_: os.getcwd}", "hydra.x", "'+hydra.x={_target_: os.getcwd}'", "hydra/launcher=NAME and"),
    ("hydra.job_logging.version=2", "hydra.job_logging.version", "'2'", "a value such as 1 ("),
    ("hydra.hydra_logging.version=2", "hydra.hydra_logging.version", "'2'", "a value such as 1 ("),
    ("hydra.sweeper._target_=builtins.dict", "hydra.sweeper._target_", "'builtins.dict'", "hydra/launcher=NAME and"),
    ("dataset._target_=builtins.dict", "dataset._target_", "'builtins.dict'", "a class or function whose parameters"),
    ("method.name=..", "method.name", "'..'", "letters, digits, dots, dashes and underscores"),
    ("model.name=-x", "model.name", "'-x'", "letters, digits, dots, dashes and underscores"),
    ("local.lr=1e308", "local.lr", "1e+308", "a number above 0, numbers being at most 2^63 - 1 or"),
    ("seed=9223372036854775808", "seed", "9223372036854775808", "a whole number of at least 0, numbers being"),
    ("model.hidden=[8,9223372036854775808]", "model.hidden", "[8, 9223372036854775808]", "a list of which each is"),
    ("hydra.searchpath=foo", "hydra.searchpath", "'foo'", "a list of folders with config files"),
    ("hydra.searchpath=[nowhere]", "hydra.searchpath", "'[nowhere]'", "a list of folders with config files"),
]

MORE = [  # as above, in every way that Hydra has to say so
    ("scale=cpu", "scale", "'cpu'", "paper or smoke; only experiments"),
    ("hydra/job_logging=xyz", "hydra/job_logging", "'xyz'", "default, disabled, none, stdout"),
    ("hydra/foo=1", "hydra/foo", "'1'", "an option that fits to the others ("),
    ("+hydra/launcher=basic", "hydra/launcher", "'+hydra/launcher=basic'", "an option that fits to the others ("),
    ("foo.bar=1", "foo.bar", "'1'", NO_KEY + "seed, rounds, "),
    ("local.foo.bar=1", "local.foo.bar", "'1'", NO_KEY + "epochs, batch_size, "),
    ("++local.foo=1", "local.foo", "1", NO_KEY + "epochs, batch_size, "),
    ("+foo=1", "foo", "1", NO_KEY),
    ("~local.foo=1", "local.foo", "'~local.foo=1'", NO_KEY + "epochs, "),
    ("~method.eps", "method.eps", "null", "a number of at least 0; the key is missing"),
    ("~model.hidden.0", "model.hidden.0", "'~model.hidden.0'", "a key that can be left out"),
    ("local={lr:0.1,foo:3}", "local.foo", "'{lr:0.1,foo:3}'", NO_KEY + "epochs, batch_size, "),
    ("local=null", "local", "null", "a group of keys, as in conf/"),
    ("local=5", "local", "5", "a group of keys, as in conf/"),
    ("local.lr=true", "local.lr", "true", "a number above 0"),
    ("local.lr={a:1}", "local.lr", "{a: 1}", "a number above 0"),
    ("seed=", "seed", "''", "a whole number of at least 0"),
    ("seed=nan", "seed", "nan", "a whole number of at least 0"),
    ("seed=1 2", "seed", "'1 2'", "a whole number of at least 0"),
    ("seed=1:2", "seed", "'1:2'", "a whole number of at least 0"),
    ("model.hidden={a:1}", "model.hidden.a", "'{a:1}'", "no such key; model.hidden has none below it"),
    ("model.hidden.5=1", "model.hidden.5", "'1'", "no such key; model.hidden has none below it, it is [200, 200]"),
    ("+model.hidden.0=1", "model.hidden.0", "'+model.hidden.0=1'", "model.hidden.0=1; the key is there already"),
    ("eval.also_aggregate={}", "eval.also_aggregate", "'{}'", "a list such as [] ("),
    ("eval.also_aggregate=[xyz]", "eval.also_aggregate", "'xyz'", "aalv, alpha, "),
    ("method.gamma=a${nope}b", "method.gamma", "'a${nope}b'", UNRESOLVED),
    ("method.gamma=${oc.env:BFL_NOPE}", "method.gamma", "'${oc.env:BFL_NOPE}'", UNRESOLVED),
    ("method.gamma=${nosuch:1}", "method.gamma", "'${nosuch:1}'", UNRESOLVED),
    ("method.gamma=${method.gamma}", "method.gamma", "'${method.gamma}'", UNRESOLVED),
    ("method._target_=nowhere.Thing", "method._target_", "'nowhere.Thing'", "something that can be imported"),
    ("defaults=[]", "defaults", "'[]'", NO_KEY),
    ("hydra.foo=1", "hydra.foo", "'1'", NO_KEY + "run, sweep, "),
    ("hydra.job=1", "hydra.job", "'1'", "its keys one by one: hydra.job.name, "),
    ("hydra.run.dir=null", "hydra.run.dir", "'null'", "a value such as '.' ("),
    ("hydra.mode=xyz", "hydra.mode", "'xyz'", "a value such as null ("),
    ("hydra.verbose=[1]", "hydra.verbose", "'[1]'", "a value such as false ("),
]

SWEPT = [
    ("method=", "method", "''", METHODS),
    ("method=xyz", "method", "'xyz'", METHODS),
    ("method", "method", "'method'", f"method=NAME; NAME is {METHODS}"),
    ("foo=1", "foo", "'1'", NO_KEY),
    ("seed=0,", "seed", "'0,'", READ),
    ("method.eps=[1", "method.eps", "'[1'", READ),
    ("seed=interval(0,1)", "seed", "'interval(0,1)'", "values that can be counted: a,b,c or range(a,b)"),
    ("seed=range(0,0)", "-m", "'no points'", "values that make at least one"),
    ("hydra.mode=RUN,MULTIRUN", "hydra.mode", "'RUN,MULTIRUN'", "one value; Hydra's own keys cannot be swept"),
    ("hydra.sweeper.limit=abc", "hydra.sweeper.limit", "'abc'", "a whole number of at least 1 or null"),
    ("hydra.sweeper.max_batch_size=0", "hydra.sweeper.max_batch_size", "0", "a whole number of at least 1 or null"),
    ("hydra.sweeper.params=1", "hydra.sweeper.params", "1", "{key: values}"),
    ("seed=range(0,3,0)", "seed", "'seed=range(0,3,0)'", "at most 100,000 points of a sweep"),
    ("seed=range(0,inf)", "seed", "'seed=range(0,inf)'", "at most 100,000 points of a sweep"),
    ("seed=range(0,1000000000)", "seed", "'seed=range(0,1000000000)'", "at most 100,000 points of a sweep"),
]


@pytest.mark.parametrize(("words", "key", "got", "allowed"), OPTIONS)
def test_options(bfl_run: BflRun, tmp_path: Path, words: list[str], key: str, got: str, allowed: str) -> None:
    check_sentence(bfl_run(*words), key, got, allowed)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("word", "key", "got", "allowed"),
    [*CHOICES, *VALUES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_overrides(bfl_run: BflRun, tmp_path: Path, word: str, key: str, got: str, allowed: str) -> None:
    check_sentence(bfl_run(word), key, got, allowed)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("word", "key", "got", "allowed"), SWEPT)
def test_sweeps(bfl_run: BflRun, tmp_path: Path, word: str, key: str, got: str, allowed: str) -> None:
    check_sentence(bfl_run("-m", word), key, got, allowed)
    assert not list(tmp_path.iterdir())


def test_what_is_no_override(bfl_run: BflRun, tmp_path: Path) -> None:
    for word in WORDS:
        check_sentence(bfl_run(word), "override", repr(word), "key=value, with a key of `bfl-run --help`")
    assert not list(tmp_path.iterdir())


def test_values_that_cannot_be_read(bfl_run: BflRun, tmp_path: Path) -> None:
    for value in UNREADABLE:
        if value != "a,":  # several values, the last of them empty
            check_sentence(bfl_run(f"seed={value}"), "seed", repr(value), READ)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("method=folla", "fola"),
        ("experimet=fola", "experiment"),
        ("local.epoch=1", "epochs"),
        ("lr=3", "local.lr or server.lr"),
        ("method/fola=1", "method=fola"),
        ("local/lr=1", "local.lr"),
        ("--seed=3", "seed=3"),
        ("--multirum", "--multirun"),
    ],
)
def test_what_was_perhaps_meant(bfl_run: BflRun, word: str, meant: str) -> None:
    assert bfl_run(word).err.endswith(f" (did you mean {meant}?)\n")


def test_the_wrong_one_of_many_is_named(bfl_run: BflRun) -> None:
    words = ["seed=1", "method=fedprox", "method.mu=1", "local.lr=0.1", "model.hidden=[3]", "rounds=2"]
    check_sentence(bfl_run(*words, "method.gamma=1", "num_clients=2"), "method.gamma", "'1'", NO_KEY)
    unnamed = bfl_run("seed=1", "model.hidden.x=1")  # Hydra's error does not say which key it is about
    check_sentence(unnamed, "model.hidden.x", "'1'", "no such key; ")
    swept = bfl_run("-m", "method=fola,fedavg", "seed=1,2", "local.foo=1")
    check_sentence(swept, "local.foo", "'1'", NO_KEY)


OWN_FILES = [
    ("method", "a: [1\nb: 2\n", "{path}", "'line 2'", "YAML ("),
    ("method", "a: 1\na: 2\n", "{path}", "'line 2'", "YAML (found duplicate key a)"),
    ("method", "name: x\ndefaults: fola\n", "method", "'own'", "an option that fits to the others (Invalid defaults"),
    (
        "method",
        "name: x\ndefaults: [nope]\n",
        "defaults of method/own",
        "'method/nope'",
        "method/NAME; NAME is bayesadmm",
    ),
    (
        "experiment",
        "# @package _global_\ndefaults:\n  - override /method: nope\n",
        "defaults of experiment/own",
        "'method/nope'",
        "method/NAME; NAME is bayesadmm, ",
    ),
]

MORE_OWN_FILES = [
    ("method", "name: x\ndefaults: [own]\n", "method", "'own'", "an option that fits to the others ("),
    ("method", "- 1\n", "method", "[1]", "a group of keys, as in conf/"),
    ("method", "", "method.name", "null", "letters, digits, "),
    (
        "experiment",
        "# @package _global_\ndefaults:\n  - override /nope: fola\n",
        "experiment",
        "'own'",
        "an option that fits to the others (In 'experiment/own': Could not override 'nope'.",
    ),
    ("experiment", "# @package _global_\nlocal: 3\n", "local", "3", "a group of keys, as in conf/"),
    ("experiment", "# @package _global_\nlocal: [3]\n", "experiment", "'own'", "an option that fits to the others ("),
]


@pytest.mark.parametrize(
    ("group", "text", "key", "got", "allowed"),
    [*OWN_FILES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_OWN_FILES)],
)
def test_wrong_files_of_ones_own(
    bfl_run: BflRun, tmp_path: Path, group: str, text: str, key: str, got: str, allowed: str
) -> None:
    path = tmp_path / "conf" / group / "own.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    check_sentence(bfl_run("--config-dir", "conf", f"{group}=own"), key.format(path=path), got, allowed)
    assert [path.name for path in tmp_path.iterdir()] == ["conf"]


def test_what_a_file_sweeps_is_read_too(bfl_run: BflRun, tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    sweep = '# @package _global_\nhydra:\n  sweeper:\n    params:\n      seed: "[1"\n'
    (tmp_path / "conf" / "experiment" / "own.yaml").write_text(sweep)
    result = bfl_run("-m", "--config-dir", "conf", "experiment=own")
    check_sentence(result, "seed", "'[1'", "a value, or several, that can be read (")
    (tmp_path / "conf" / "experiment" / "own.yaml").write_text(sweep.replace('seed: "[1"', "dataset@foo: mnist"))
    result = bfl_run("-m", "--config-dir", "conf", "experiment=own")
    assert result.code == 1  # a point of a sweep
    sentence = "dataset@foo: got 'dataset@foo=mnist', allowed: dataset=NAME; a group has one place in the config"
    assert result.err == f"bfl-run: dataset@foo=mnist experiment=own: {sentence}\n"


def test_a_word_of_hydras_own_is_named_among_others(bfl_run: BflRun) -> None:
    result = bfl_run("seed=1", "rounds=1", "+hydra.callbacks.x=3")
    check_sentence(result, "hydra.callbacks.x", "'+hydra.callbacks.x=3'", "files and values that fit together (")


def test_points_of_a_sweep_say_the_same(bfl_run: BflRun) -> None:
    result = bfl_run("-m", "method=xyz,fola", "local.foo=1")
    assert result.code == 2  # no point has that key
    result = bfl_run("-m", "method=xyz,fola", "method.foo=1")
    assert (result.code, result.out) == (1, "Sweep of 2: 2 failed\n")
    first, second = result.err.splitlines()
    assert first.startswith("bfl-run: method=xyz method.foo=1: method: got 'xyz', allowed: bayesadmm, ")
    assert second.startswith(f"bfl-run: method=fola method.foo=1: method.foo: got '1', allowed: {NO_KEY}_target_, ")


def test_own_folders_are_looked_into(bfl_run: BflRun, tmp_path: Path) -> None:
    """Options, keys and names of one's own are known to the sentences; so are those that Hydra's own key adds."""
    (tmp_path / "conf" / "method").mkdir(parents=True)
    (tmp_path / "conf" / "method" / "mine.yaml").write_text("_target_: nowhere.Mine\nname: mine\ndeviation: 0.1\n")
    own = bfl_run("--config-dir", "conf", "method=mime")
    check_sentence(own, "method", "'mime'", METHODS)
    assert ", mine, mixture" in own.err
    keys = bfl_run("--config-dir", "conf", "method=mine", "method.foo=3")
    check_sentence(keys, "method.foo", "'3'", NO_KEY + "_target_, name, deviation")
    added = bfl_run(f"hydra.searchpath=[file://{tmp_path}/conf]", "method=mine")
    check_sentence(added, "method._target_", "'nowhere.Mine'", "something that can be imported")
    missing = bfl_run(f"hydra.searchpath=[file://{tmp_path}/conf]", "method=mime")
    check_sentence(missing, "method", "'mime'", METHODS)
