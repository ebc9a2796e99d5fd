"""``vime contract``: show, digest, diff, export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkernel.contract.build import FORWARD_CASES
from rlkernel.contract.serial import read_contract
from tests.pipeline.helpers import text
from tests.runtime.helpers import PIPELINE, run
from vime.cli.contract import _ranges, read_pipeline_contract
from vime.cli.main import invoke

QUICKSTART = str(Path(__file__).parents[2] / "pipelines/quickstart.yaml")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of a fixed width (of rich; it changes nothing but line breaks)."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def pipeline(tmp_path: Path) -> str:
    file = tmp_path / "small.yaml"
    file.write_text(text(tmp_path / "run"))
    return str(file)


def call(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = invoke(["contract", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def lines(printed: str) -> list[dict]:
    return [json.loads(line) for line in printed.splitlines()]


def test_show_prints_every_region_and_case_with_six_points(capsys: Capture):
    code, printed, _ = call(capsys, "show", QUICKSTART)
    assert code == 0
    contract = read_pipeline_contract(QUICKSTART)
    for case, region in contract.entries:
        assert case in printed and region in printed
    assert "eps f32:358637bd (9.99999997e-07)" in printed
    rows = printed.count("dependency")
    for point in ("split", "merge order", "precision", "rounding", "primitives"):
        assert printed.count(f"  {point}  ") == rows
    assert "between regions" in printed
    first = printed.index("qkv_proj   ")
    assert printed[first:].split("\n")[0].split()[1:3] == ["cases", "rollout_prefill,"]  # equal cases share a row
    assert printed.index("trainer_recompute", first) < printed.index("qk_norm", first)


def test_show_of_one_case_speaks_of_that_case_alone(capsys: Capture):
    code, printed, _ = call(capsys, "show", QUICKSTART, "--case", "trainer_score", "--json")
    assert code == 0
    edges = [row for row in lines(printed) if row["event"] == "boundary"]
    assert edges and all(row["cases"] == ["trainer_score"] for row in edges)


def test_show_as_json_has_every_entry_once_and_every_boundary_dtype(capsys: Capture):
    code, printed, _ = call(capsys, "show", QUICKSTART, "--json")
    assert code == 0
    found = lines(printed)
    pairs = [(case, row["region"]) for row in found if row["event"] == "entry" for case in row["cases"]]
    assert sorted(pairs) == sorted(read_pipeline_contract(QUICKSTART).entries)
    assert len(set(pairs)) == len(pairs)
    edges = [row for row in found if row["event"] == "boundary"]
    assert edges and {edge["dtype"] for edge in edges} == {"float32"}
    _, printed, _ = call(capsys, "show", QUICKSTART, "--json", "--set", "contract.dtype=bfloat16")
    dtypes = {(row["from"], row["to"]): row["dtype"] for row in lines(printed) if row["event"] == "boundary"}
    assert dtypes["rms_norm", "qkv_proj"] == "bfloat16" and dtypes["lm_head", "logprob"] == "float32"


def test_show_selects_cases_and_regions(capsys: Capture):
    _, printed, _ = call(capsys, "show", QUICKSTART, "--json", "--case", "rollout_decode", "--region", "rms_norm")
    (row,) = [row for row in lines(printed) if row["event"] == "entry"]
    assert row["region"] == "rms_norm" and row["cases"] == ["rollout_decode"]
    _, printed, _ = call(capsys, "show", QUICKSTART, "--json", "--region", "rms_norm")
    entries = [row for row in lines(printed) if row["event"] == "entry"]
    assert [row["cases"] for row in entries] == [list(FORWARD_CASES), ["trainer_backward"]]
    for arguments, words in (
        (("--case", "decode"), "the contract has no case 'decode'; it has rollout_prefill"),
        (("--region", "gelu"), "the contract has no region 'gelu'; it has embedding"),
        (
            ("--case", "optimizer_step", "--region", "attention"),
            "region 'attention' is not computed in case 'optimizer_step': it is in rollout_prefill, rollout_decode, ",
        ),
        (("--case", "optimizer_step", "--region", "attention"), "; the case has gradient_norm, loss, adamw"),
    ):
        code, printed, message = call(capsys, "show", QUICKSTART, *arguments)
        assert code == 2 and words in message and not printed


def test_digests_of_both_sides_and_of_every_entry(capsys: Capture, pipeline: str):
    code, printed, _ = call(capsys, "digest", pipeline, "--json")
    assert code == 0
    (found,) = lines(printed)
    trainer, engine = found["identities"]["trainer"], found["identities"]["native-0"]
    assert trainer["semantic"] == engine["semantic"]
    assert trainer["numerical_policy"] == engine["numerical_policy"]
    contract = read_pipeline_contract(pipeline)
    assert set(found["entries"]) == {f"{case}/{region}" for case, region in contract.entries}
    assert trainer["numerical_policy"] == contract.identities({}).numerical_policy
    code, plain, _ = call(capsys, "digest", pipeline)
    assert code == 0 and f"{trainer['deployment']}  trainer deployment" in plain
    overrides = ("--set", "numerics.trainer=native", "--set", "on_mismatch=continue")
    _, printed, _ = call(capsys, "digest", pipeline, "--json", *overrides)
    native = lines(printed)[0]["identities"]
    assert native["trainer"]["numerical_policy"] != native["native-0"]["numerical_policy"]
    assert native["trainer"]["semantic"] == native["native-0"]["semantic"]


def test_what_is_exported_is_the_contract(capsys: Capture, pipeline: str, tmp_path: Path):
    file = str(tmp_path / "contract.json")
    assert call(capsys, "export", pipeline, file)[0] == 0
    assert read_contract(Path(file)) == read_pipeline_contract(pipeline)
    assert call(capsys, "diff", pipeline, file)[:2] == (0, "the contracts are equal\n")
    code, _, message = call(capsys, "export", pipeline, str(tmp_path / "no/contract.json"))
    assert code == 2 and "there is no folder" in message


def test_an_export_overwrites_nothing_unless_it_is_told_to(capsys: Capture, pipeline: str, tmp_path: Path):
    source, target = Path(pipeline), tmp_path / "contract.json"
    before = source.read_bytes()
    link = tmp_path / "link.yaml"
    link.symlink_to(source)
    for file in (pipeline, str(link), str(tmp_path / "." / source.name)):
        for force in ((), ("--force",)):
            code, _, message = call(capsys, "export", pipeline, file, *force)
            assert code == 2 and "is the pipeline itself" in message
    assert source.read_bytes() == before and link.is_symlink()
    target.write_text("kept")
    code, _, message = call(capsys, "export", pipeline, str(target))
    assert code == 2 and "exists already" in message and "--force" in message and target.read_text() == "kept"
    assert call(capsys, "export", pipeline, str(target), "--force")[0] == 0
    assert read_contract(target) == read_pipeline_contract(pipeline)


def test_an_exported_contract_is_no_pipeline(capsys: Capture, pipeline: str, tmp_path: Path):
    file = str(tmp_path / "contract.json")
    call(capsys, "export", pipeline, file)
    for arguments in (("show", file), ("digest", file), ("export", file, str(tmp_path / "again.json"))):
        code, _, message = call(capsys, *arguments)
        assert code == 2 and f"{file} is an exported contract" in message and "'vime contract diff' alone" in message
    assert not (tmp_path / "again.json").exists()


def test_contracts_of_another_version_are_compared_with_a_note(capsys: Capture, pipeline: str, tmp_path: Path):
    file = tmp_path / "other.json"
    call(capsys, "export", pipeline, str(file))
    data = json.loads(file.read_text())
    entry = data["numerical_policy"]["entries"]["rollout_decode/rms_norm"]
    entry["split"]["lanes"] //= 2
    file.write_text(json.dumps(data))
    code, printed, notes = call(capsys, "diff", pipeline, str(file))
    made = entry["split"]["lanes"] * 2
    sentence = (
        f"rollout_decode/rms_norm.split.lanes is {made // 2}; a contract of this model, profile and claims has {made}"
    )
    assert code == 1 and printed == (
        f"rms_norm.split.lanes in rollout_decode: {made} in {pipeline}, {made // 2} in {file}\n"
    )
    assert notes == f"note: {file} is not what this version makes: numerical_policy.entries.{sentence}\n"
    assert call(capsys, "diff", str(file), str(file))[:2] == (0, "the contracts are equal\n")
    _, printed, notes = call(capsys, "diff", pipeline, str(file), "--json")
    assert len(lines(printed)) == 1 and notes.count("note: ") == 1
    entry["split"]["lanes"] = -3
    file.write_text(json.dumps(data))
    code, printed, message = call(capsys, "diff", pipeline, str(file))
    assert code == 2 and not printed and "rms_norm.split.lanes is -3: at least 1 is needed" in message


def test_differences_are_named_with_both_values_and_the_cases_folded(capsys: Capture, pipeline: str, tmp_path: Path):
    file = str(tmp_path / "other.json")
    changes = [
        "contract.topology={tp: 2}",
        "stages.train.optimizer.weight_decay=0.1",
        "model.overrides={num_layers: 1}",
    ]
    call(capsys, "export", pipeline, file, *(part for change in changes for part in ("--set", change)))
    code, printed, _ = call(capsys, "diff", pipeline, file)
    assert code == 1
    assert f"numerical_policy.topology.tp: 1 in {pipeline}, 2 in {file}" in printed
    assert "numerical_policy.optimizer.weight_decay: f64:0000000000000000 (0) in" in printed
    assert "semantic.model.num_layers: " in printed
    leaves = [line for line in printed.splitlines() if line.startswith("o_proj.split.leaves in ")]
    assert len(leaves) == 1 and all(case in leaves[0] for case in FORWARD_CASES)
    code, printed, _ = call(capsys, "diff", pipeline, file, "--json")
    assert code == 1
    paths = {tuple(row["path"]): (row["left"], row["right"]) for row in lines(printed)}
    assert paths["numerical_policy", "entries", "trainer_score/o_proj", "split", "leaves"] == (1, 2)


def test_regions_are_compared_one_by_one(capsys: Capture, pipeline: str, tmp_path: Path):
    other = tmp_path / "other.yaml"
    other.write_text(Path(pipeline).read_text().replace("tiny-qwen3", "tiny-llama"))
    code, printed, _ = call(capsys, "diff", pipeline, str(other))
    assert code == 1
    found = {line.partition(": ")[0]: line.partition(": ")[2] for line in printed.splitlines()}
    assert found["semantic.regions.layers.N.qk_norm in layers 0 to 1"] == f"present in {pipeline}, absent in {other}"
    assert "layers.0.k_normed" in found["semantic.regions.layers.N.rope.inputs[1] in layers 0 to 1"]
    assert not any(name == "semantic.regions" for name in found) and max(map(len, printed.splitlines())) < 600


def test_layers_are_folded_into_ranges():
    assert _ranges([3]) == "layer 3" and _ranges([5, 0, 2, 3, 4]) == "layers 0, 2 to 5"


def test_a_damaged_file_is_named_by_what_is_wrong_with_it(capsys: Capture, pipeline: str, tmp_path: Path):
    file = tmp_path / "damaged.json"
    call(capsys, "export", pipeline, str(file))
    whole = file.read_text()
    file.write_text("{}")
    code, _, message = call(capsys, "diff", pipeline, str(file))
    assert code == 2 and "missing fields ['numerical_policy', 'semantic']" in message and "unknown" not in message
    file.write_text(whole.replace('"rms_norm"', '"rms_nrm"', 1))
    code, _, message = call(capsys, "diff", pipeline, str(file))
    assert code == 2 and "'rms_norm' in this version, 'rms_nrm' in the file" in message
    assert "semantic.regions.layers.0.attention_norm.kind" in message


def test_what_cannot_be_compared_is_refused(capsys: Capture, pipeline: str, tmp_path: Path):
    damaged = tmp_path / "damaged.json"
    call(capsys, "export", pipeline, str(damaged))
    data = json.loads(damaged.read_text())
    data["numerical_policy"]["entries"]["trainer_score/rope"]["split"]["step"] = 0.5
    damaged.write_text(json.dumps(data))
    for other, words in (
        (str(damaged), "is the raw float 0.5"),
        (str(tmp_path / "none.json"), "cannot be read"),
        (str(tmp_path), "is no run directory with a contract"),
        (str(tmp_path / "none.yaml"), "none.yaml"),
    ):
        code, _, message = call(capsys, "diff", pipeline, other)
        assert code == 2 and words in message


def test_the_contract_of_a_run_directory_is_that_of_its_pipeline(capsys: Capture, tmp_path: Path):
    run(tmp_path / "run", "steps=1")
    file = tmp_path / "small.yaml"
    file.write_text(PIPELINE.format(directory=tmp_path / "run"))
    code, printed, _ = call(capsys, "diff", str(tmp_path / "run"), str(file))
    # one step less: the schedule runs over fewer updates, and nothing else differs
    assert code == 1 and printed.count("\n") == 1 and "optimizer.schedule.total_updates: 1 in" in printed
