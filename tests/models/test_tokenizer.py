"""Tokenizers from a tiny GGUF that the test writes, and from tokenizer.json."""

import json
import sys

import numpy as np
import pytest
from mxjax_models.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install 'mxjax[gguf]'")
tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers: pip install 'mxjax[tokenizer]'")

BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TOKENS = ["<|start|>", "<|end|>", "<think>", *BYTES, "he", "ll", "hell", "hello", "Ġw", "12"]
TEXT = "hello world, it's 12 o'clock: déjà vu 你好 🙂\n\n\tx  = 3.14;"


def write(file, *, model="gpt2", pre="smollm", drop=()):
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    if "tokens" not in drop:
        writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 4] + [1] * (len(TOKENS) - 3))
    if "merges" not in drop:
        writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    if "eos" not in drop:
        writer.add_eos_token_id(1)
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(params=["smollm", "gpt-2", "llama-bpe", "qwen2"])
def tokenizer(request, tmp_path):
    return load_tokenizer(write(tmp_path / "t.gguf", pre=request.param))


def test_round_trip(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert all(isinstance(i, int) for i in ids)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(np.array(ids)) == TEXT
    assert ids[0] == TOKENS.index("hello") and ids[1] == TOKENS.index("Ġw")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (len(TOKENS), 0, 1)


def test_special_tokens(tokenizer):
    ids = tokenizer.encode("<|start|>he<think>he<|end|>")
    he = TOKENS.index("he")
    assert ids == [0, he, 2, he, 1]
    assert tokenizer.decode(ids) == "<|start|>he<think>he<|end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he<think>he"
    assert tokenizer.encode("he", add_bos=True) == [0, he]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", ",", "ĠA", "'", "S", "!", "Ċ", "x"]),
        ("gpt-2", ["it", "'s", "Ġ1234", ",", "ĠA", "'", "S", "!", "Ċ", "x"]),
        ("llama-bpe", ["it", "'s", "Ġ", "123", "4", ",", "ĠA", "'S", "!Ċ", "x"]),
        ("qwen2", ["it", "'s", "Ġ", "1", "2", "3", "4", ",", "ĠA", "'S", "!Ċ", "x"]),
    ],
)
def test_words(tmp_path, pre, words):
    """Where the families differ: digits alone, in threes or together; 'S; punctuation with its line end."""
    backend = load_tokenizer(write(tmp_path / "t.gguf", pre=pre)).backend
    assert [w for w, _ in backend.pre_tokenizer.pre_tokenize_str("it's 1234, A'S!\nx")] == words


def test_smollm_never_merges_digits(tmp_path):
    one, two = TOKENS.index("1"), TOKENS.index("2")
    assert load_tokenizer(write(tmp_path / "a.gguf", pre="smollm")).encode("12") == [one, two]
    assert load_tokenizer(write(tmp_path / "b.gguf", pre="gpt-2")).encode("12") == [TOKENS.index("12")]


def test_folder(tmp_path):
    source = load_tokenizer(write(tmp_path / "t.gguf"))
    source.backend.save(str(tmp_path / "tokenizer.json"))
    plain = load_tokenizer(tmp_path)
    assert plain.encode(TEXT) == source.encode(TEXT) and plain.bos_id is None
    with pytest.raises(ValueError, match="no BOS token"):
        plain.encode("he", add_bos=True)
    config = {"bos_token": {"content": "<|start|>"}, "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    named = load_tokenizer(str(tmp_path))
    assert (named.bos_id, named.eos_id) == (0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(model="llama"), "tokenizer.ggml.model 'llama' is not supported, only 'gpt2'"),
        (dict(pre="tekken"), "tokenizer.ggml.pre 'tekken' is not supported; supported: smollm, gpt-2"),
        (dict(drop=["tokens"]), r"no tokenizer\.ggml\.tokens"),
        (dict(drop=["merges"]), r"no tokenizer\.ggml\.merges"),
    ],
)
def test_gguf_errors(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(write(tmp_path / "t.gguf", **options))


def test_no_eos(tmp_path):
    assert load_tokenizer(write(tmp_path / "t.gguf", drop=["eos"])).eos_id is None


def test_path_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_tokenizer(tmp_path / "t.gguf")
    (tmp_path / "t.bin").touch()
    with pytest.raises(ValueError, match="neither a folder nor"):
        load_tokenizer(tmp_path / "t.bin")


@pytest.mark.parametrize(("package", "extra"), [("tokenizers", "tokenizer"), ("gguf", "gguf")])
def test_package_missing(tmp_path, monkeypatch, package, extra):
    file = write(tmp_path / "t.gguf")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"pip install 'mxjax\[{extra}\]'"):
        load_tokenizer(file)
