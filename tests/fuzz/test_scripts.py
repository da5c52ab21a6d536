"""Whatever a name, a path or an option holds, `meshpar launch` passes it on as it is, or refuses it.

The scripts are run by bash and read as sbatch reads them, the manifests by a YAML parser and as Kubernetes expands
them. (Under MPI, `mpirun meshpar train` is the user's own command line: meshpar writes no script.)
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml

from meshpar.launch.jobset import JobSet
from meshpar.launch.slurm import Job
from tests.config.keys import PLAIN, text_keys
from tests.config.test_text_keys import OPAQUE
from tests.fuzz.scripts import PIECES, expanded_by_kubernetes, read_by_sbatch, run_by_bash
from tests.fuzz.test_fuzz import SEEDS

SLURM = ("launch", "--slurm", "--processes=1", "--dry-run")
K8S = ("launch", "--k8s", "--processes=1", "--image=i", "--volume=c:/v", "--dry-run")
KEYS = {str(key): key for key in text_keys()}
KEPT = [
    "--job-name=meshpar",
    "--nodes=1",
    "--ntasks-per-node=1",
    "--signal=USR1@120",
    "--requeue",
    "--open-mode=append",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "at").mkdir()
    monkeypatch.chdir(tmp_path / "at")
    Path("config.yaml").write_text(json.dumps(PLAIN))
    return tmp_path


def text(rng: random.Random) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 5)))


def check_slurm(said, folder: Path, words: list[str], options: list[str], logs: str | None) -> bool:
    """Whether the script was printed; then it does exactly what was asked for."""
    assert_plain(said)
    if said.code:
        assert said.out == ""
        return False
    calls = run_by_bash(said.out, folder)
    assert [call[0] for call in calls] == ["srun"]
    assert calls[0][3:] == ["meshpar", *words]
    read = read_by_sbatch(said.out)
    assert read[:6] + read[7:] == KEPT + options
    if logs is not None:
        assert read[6] == f"--output={logs.replace('%', '%%')}/slurm-%j.log"
        assert calls[0][2] == f"--output={logs.replace('%', '%%')}/process-%t.log"
    assert not list((folder / "work").iterdir())
    return True


def check_k8s(said, words: list[str]) -> bool:
    assert_plain(said)
    if said.code:
        assert said.out == ""
        return False
    (manifest,) = yaml.safe_load_all(said.out)
    plain = JobSet(["x"], 1, "i", "x", None, {"c": "/v"}).manifest()
    container = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    variables = {one["name"]: one.get("value", "filled in") for one in container["env"]}
    assert [expanded_by_kubernetes(word, variables) for word in container["command"]] == ["meshpar", *words]
    assert shape(manifest) == shape(plain), "no text becomes a key"
    return True


def shape(data) -> object:
    """The keys of plain data; the words of a command are texts of any number."""
    if isinstance(data, dict):
        return {key: shape(value) if key != "command" else "words" for key, value in data.items()}
    return [shape(item) for item in data] if isinstance(data, list) else type(data)


def assert_plain(said) -> None:
    """Nothing that is printed commands a terminal; bad input ends with a message."""
    assert said.code in (0, 2), said.err
    assert "Traceback" not in said.err
    for printed in (said.out, said.err):
        assert all(c.isprintable() or c in "\n\t" for c in printed), repr(printed)


# A value of a config ------------------------------------------------------------------------------------------------


def key_case(command, folder: Path, key, value: str) -> tuple[bool, bool]:
    """A key has the text in a file, and by an override. Whether Slurm, and Kubernetes, would get a job."""
    Path("config.yaml").write_text(json.dumps(key.data(value)))
    logs = f"{value}/logs" if key.at == ("run_dir",) else "run/logs"
    known = str(Path(logs)) if key.name != "target" else None
    by_file = ["train", "config.yaml"]
    passed = check_slurm(command(*SLURM, "--", *by_file), folder, by_file, [], known)
    section = str(key.at[0])
    by_word = ["train", "config.yaml", f"{section}={json.dumps(key.data(value)[section], ensure_ascii=False)}"]
    if section != "run_dir":
        by_word.append("run_dir=/v/x")
    return passed, check_k8s(command(*K8S, "--name=x", "--", *by_word), by_word)


@pytest.mark.slow
def test_a_newline_in_each_text_key_reaches_no_script(folder, command):
    for name, key in KEYS.items():
        if key.name in OPAQUE:
            continue
        assert key_case(command, folder, key, "run/x\ntouch CANARY #") == (False, False), name


@pytest.mark.parametrize("value", ["a b", "it's", '"', "$(touch CANARY)`touch CANARY`", "50%j", "#1"])
def test_a_run_dir_with_special_characters_is_passed_on(folder, command, value):
    assert key_case(command, folder, KEYS["run_dir"], value)[0]


def sampled_keys(seed: int, count: int, command, folder: Path) -> int:
    rng = random.Random(f"keys {seed}")
    return sum(any(key_case(command, folder, rng.choice(list(KEYS.values())), text(rng))) for _ in range(count))


def test_a_sample_of_texts_in_keys(folder, command):
    assert sampled_keys(0, 15, command, folder) > 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_700_texts_in_keys(folder, command, seed):
    assert sampled_keys(seed, 700, command, folder) > 50


# Words of the command line ------------------------------------------------------------------------------------------


def word_case(rng: random.Random, folder: Path, command) -> tuple[bool, bool]:
    """A text in an option, in an override, in the name of the config."""
    value = text(rng)
    name = f"./{value.replace('/', '')}.yaml"
    Path(name).write_text(json.dumps(PLAIN))
    words = ["train", name, "run_dir=/v/x", f"optim.lr=1e-2 # {value}" if value.isprintable() else "num_steps=3"]
    options, logs = [], "/v/x/logs"
    form = rng.randrange(3)
    given: list[str] = []
    if form == 0:
        options = [f"--comment={value}"]
        given = [f"--sbatch={options[0]}"]
    elif form == 1:
        logs = str(Path(value))
        given = [f"--logs={value}"]
    slurm = check_slurm(command(*SLURM, *given, "--", *words), folder, words, options, logs)
    option = rng.choice(("image", "name", "limit", "volume"))
    more = {"image": value, "name": value, "limit": f"r={value}", "volume": f"c:{value}"}[option]
    said = command(*K8S, f"--{option}={more}", "--", *words)
    assert_plain(said)
    if not said.code and option in ("image", "limit"):
        (manifest,) = yaml.safe_load_all(said.out)
        container = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
        assert (container["image"] if option == "image" else container["resources"]["limits"]["r"]) == value
    passed = slurm, check_k8s(command(*K8S, "--name=x", "--", *words), words)
    Path(name).unlink()
    return passed


def sampled_words(seed: int, count: int, command, folder: Path) -> tuple[int, int]:
    rng = random.Random(f"words {seed}")
    passed = [word_case(rng, folder, command) for _ in range(count)]
    return sum(slurm for slurm, _ in passed), sum(k8s for _, k8s in passed)


def test_a_sample_of_texts_in_words(folder, command):
    slurm, k8s = sampled_words(0, 15, command, folder)
    assert slurm > 4
    assert k8s > 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_700_texts_in_words(folder, command, seed):
    slurm, k8s = sampled_words(seed, 700, command, folder)
    assert slurm > 200
    assert k8s > 200


def test_a_prompt_of_several_lines_is_one_word(folder, command):
    """The text of a prompt may have any characters: they reach the program, and no terminal."""
    words = ["generate", "run", "--prompt", "two\nlines, it's \\ $(touch CANARY) \x1b[2J \x85 模"]
    script = str(Job(words, 1, 1, Path("logs")))
    assert run_by_bash(script, folder)[0][3:] == ["meshpar", *words]
    assert "\x1b" not in script
    assert "\n#" not in script.partition("srun")[2]


# Controls -----------------------------------------------------------------------------------------------------------


def test_control_an_unquoted_line_is_seen(folder):
    script = str(Job(["train"], 1, 1, Path("logs"))).replace("logs/slurm", "x\ntouch CANARY #/slurm")
    run_by_bash(script, folder)
    assert [path.name for path in (folder / "work").iterdir()] == ["CANARY"]


def test_control_a_space_breaks_an_unquoted_option():
    script = "#!/bin/bash\n#SBATCH --output=my run/slurm-%j.log\nsrun x\n"
    assert read_by_sbatch(script) == ["--output=my", "run/slurm-%j.log"]


def test_control_an_unescaped_reference_is_expanded():
    assert expanded_by_kubernetes("$(A)$$(A)$x$(B)", {"A": "1"}) == "1$(A)$x$(B)"
