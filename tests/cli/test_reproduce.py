"""The commands of docs/reproduce.md run, with mini-wan, a tiny size and a stand-in for VBench."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from diffsieve.cli import main

ROOT = Path(__file__).parents[2]
PROMPTS = ("a fox moves up over a blue background", "a rocket grows over a red background")
# What stands for the weights, machine and size of the page. Everything else runs as it is written.
SUBSTITUTES = {
    "--model": "mini-wan",
    "--python": sys.executable,
    "--limit": "2",
    "--frames": "9",
    "--height": "64",
    "--width": "64",
    "--steps": "3",
    "--warmup": "1",
    "--shard": "0/1",
    "--device": "cpu",
}


def documented() -> list[list[str]]:
    """The words of every diffsieve command of the page, in their order."""
    text = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = re.findall(r"^(diffsieve .*)$", "".join(blocks), re.MULTILINE)
    return [shlex.split(line)[1:] for line in lines]


def substituted(words: list[str]) -> list[str]:
    replaced = [SUBSTITUTES.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    return replaced + (["--device", "cpu"] if words[:2] == ["vbench", "score"] else [])


@pytest.mark.slow
def test_the_commands_lead_from_prompts_to_tables(tmp_path, monkeypatch, no_weights, capsys):
    package = tmp_path / "site" / "vbench"
    shutil.copytree(ROOT / "tests" / "vbench" / "stand_in" / "vbench", package)
    entries = [{"prompt_en": p, "dimension": ["aesthetic_quality", "imaging_quality"]} for p in PROMPTS]
    (package / "VBench_full_info.json").write_text(json.dumps(entries), encoding="utf-8")
    info = package.parent / "vbench-0.1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vbench\nVersion: 0.1.5\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.chdir(tmp_path)

    commands = documented()
    assert [words[:2] for words in commands] == [
        ["vbench", "prompts"], ["weights", "lpips"], ["study", "clips"], ["study", "report"], ["capture", "--model"],
        ["study", "recall"], ["vbench", "generate"], ["vbench", "score"], ["vbench", "table"],
    ]  # fmt: skip
    printed = {}
    for words in commands:
        if words == ["weights", "lpips"]:  # a download; it has tests of its own
            continue
        if ">" in words:
            words = words[: words.index(">")]
        with pytest.raises(SystemExit) as caught:
            main(substituted(words))
        output = capsys.readouterr()
        assert not caught.value.code, (words, output.err)
        printed[" ".join(words[:2])] = output.out
        if words[:2] == ["vbench", "prompts"]:
            Path("prompts.txt").write_text(output.out, encoding="utf-8")
            Path("two-prompts.txt").write_text(output.out.splitlines()[0] + "\n", encoding="utf-8")
    assert printed["vbench prompts"].splitlines() == list(PROMPTS)

    report = json.loads(Path("outputs/table5/study.json").read_text(encoding="utf-8"))
    rows = {(row["variant"], row["sparsity"]): row for row in report["clips"]["rows"]}
    assert set(rows) == {("noise floor", None)} | {(v, s) for v in ("paper", "preset default") for s in (0.5, 0.6)}
    assert all(row["clips"] == 2 for row in rows.values())
    assert report["recall"]["calls"] == 10  # 5 layers, the steps after the warm-up
    for word in ("paper", "PSNR, dB", "density, all"):
        assert word in printed["study report"]
    assert "aesthetic_quality" in printed["vbench table"]
