"""lm_eval itself on a quantized folder: a local task file, local data, no network."""

import json

import numpy as np
import pytest
from cli_models import tiny, write_folder
from click.testing import CliRunner

from mxjax.cli import main
from mxjax.cli.console import Console
from mxjax.cli.models import open_model
from mxjax.eval import token_nll

pytest.importorskip("lm_eval", reason="pip install 'mxjax[lm-eval]'")

QUESTIONS = [
    {"question": "a b ab", "choices": ["ba", "abab c", "q"], "answer": 1},
    {"question": "one two", "choices": ["three", "t", "th"], "answer": 0},
    {"question": "x", "choices": ["y z", "zz", "12345"], "answer": 2},
]
TASKS = {
    "local_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "local_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{choices[0]}}",
        "metric_list": [{"metric": "word_perplexity", "aggregation": "weighted_perplexity"}],
    },
    "local_generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """``q/``, a quantized folder, and ``tasks/`` with task files on local data."""
    root = tmp_path_factory.mktemp("lm_eval")
    write_folder(root / "model", tiny())
    result = CliRunner().invoke(main, ["quantize", str(root / "model"), str(root / "q"), "--recipe", "mxfp4"])
    assert result.exit_code == 0, result.stderr
    (root / "tasks").mkdir()
    (root / "data.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    for name, task in TASKS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(root / "data.jsonl")}}}
        whole = {"task": name, "test_split": "test", **source, **task}
        (root / "tasks" / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
    return root


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf" / "datasets"))


def log_likelihood(opened, context, continuation):
    """Of tokens, on the sequence alone."""
    tokens = np.array([[*context, *continuation]])
    return -token_nll(opened.model, tokens)[0, -len(continuation) :].astype(np.float64).sum()


def test_local_tasks(place):
    import lm_eval
    from lm_eval.tasks import TaskManager

    import mxjax.cli.lm_eval  # noqa: F401  (registers the name)

    manager = TaskManager(include_path=str(place / "tasks"), include_defaults=False)
    found = lm_eval.simple_evaluate(
        "mxjax",
        f"path={place / 'q'},batch_size=4,max_length=24",
        tasks=list(TASKS),
        task_manager=manager,
        log_samples=True,
        bootstrap_iters=0,
    )
    opened = open_model(str(place / "q"), Console(quiet=True))
    encode = opened.tokenizer().encode
    assert opened.quantized
    # Batches are padded to 32 tokens: the same float32 arithmetic on other shapes. Up to 24 terms of some 5 nats, each
    # rounded at 2**-21: below 2e-5 in a sum. (An activation on a tie could take the other code; here none does.)
    close = {"abs": 1e-4}
    right = 0
    for sample in found["samples"]["local_choice"]:
        doc = sample["doc"]
        context = encode(f"Q: {doc['question']}\nA:")
        expected = [log_likelihood(opened, context, encode(f" {choice}")) for choice in doc["choices"]]
        assert [float(r[0][0]) for r in sample["resps"]] == pytest.approx(expected, **close)
        right += int(np.argmax(expected)) == doc["answer"]
    assert found["results"]["local_choice"]["acc,none"] == pytest.approx(right / len(QUESTIONS))
    total, words = 0.0, 0
    for doc in QUESTIONS:
        text = f"{doc['question']} {doc['choices'][0]}"
        total += log_likelihood(opened, [2], encode(text))
        words += len(text.split())
    measured = found["results"]["local_rolling"]["word_perplexity,none"]
    assert np.log(measured) == pytest.approx(-total / words, **close)
    from mxjax_models.generate import generate

    for sample in found["samples"]["local_generate"]:
        new = np.asarray(generate(opened.model, [encode(sample["doc"]["question"])], 6, eos_id=2))[0].tolist()
        text = opened.tokenizer().decode(new[: new.index(2)] if 2 in new else new)
        assert sample["resps"][0][0] == text.partition("\n")[0]


def test_the_command(place, capfd):
    arguments = ["--tasks", "local_choice", "--include_path", str(place / "tasks"), "--output_path", str(place / "out")]
    result = CliRunner().invoke(main, ["lm-eval", str(place / "q"), *arguments])
    assert result.exit_code == 0, (result.stdout, result.stderr, result.exception)
    (file,) = (place / "out").rglob("results_*.json")
    assert "acc,none" in json.loads(file.read_text())["results"]["local_choice"]
    refused = CliRunner().invoke(main, ["lm-eval", "a,b=c", "--tasks", "x"])
    assert refused.exit_code == 1 and "rename a,b=c" in refused.stderr
